"""What a run may cost, and what it has cost so far, over all of its attempts.

Counted is the time in which the job had its nodes. A GPU counts from the start of an attempt to its end, whatever it
did; on CPUs a rank counts as a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from clustertrain.config.contract import ContractSpec
from clustertrain.run import attempts, events, json_files, metrics
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """``cost`` is in the money of ``contract.gpu_hour_cost``."""

    gpu_hours: float = 0.0
    wall_hours: float = 0.0
    cost: float = 0.0

    def plus(self, seconds: float, gpus: int, gpu_hour_cost: float) -> Used:
        hours = max(0.0, seconds) / 3600
        return Used(
            gpu_hours=self.gpu_hours + hours * gpus,
            wall_hours=self.wall_hours + hours,
            cost=self.cost + hours * gpus * gpu_hour_cost,
        )


LIMITS = ("gpu_hours", "wall_hours", "cost")


def spent(contract: ContractSpec, used: Used) -> str:
    """Which limits are reached, in words; empty where none is."""
    reached = [
        f"{getattr(used, name):.4g} of {name} = {getattr(contract, name):g}"
        for name in LIMITS
        if getattr(contract, name) and getattr(used, name) >= getattr(contract, name)
    ]
    return f"the budget is spent: {', '.join(reached)}" if reached else ""


def left(contract: ContractSpec, used: Used) -> dict[str, float]:
    """By limit that the contract sets, what is left of it."""
    return {n: max(0.0, limit - getattr(used, n)) for n in LIMITS if (limit := getattr(contract, n))}


def used(run: RunDir, history: Sequence[Attempt], now: float | None, gpu_hour_cost: float) -> Used:
    """``history``: all attempts to be counted. ``now`` (UTC epoch s) where the last one of them may be running, else
    None."""
    found = Used()
    planned = json_files.read(run.plan, {"world_size": float}).value
    ranks = int(planned.get("world_size") or 1)
    for i, attempt in enumerate(history):
        if attempt.start is None:
            continue
        following = next((a.start for a in history[i + 1 :] if a.start is not None), math.inf)
        if now is not None and i == len(history) - 1 and attempt.end is None:
            end = now
        else:
            end = min(_end_of(run, attempt), following)
        found = found.plus(end - attempt.start, _ranks_of(run, attempt) or ranks, gpu_hour_cost)
    return found


def _end_of(run: RunDir, attempt: Attempt) -> float:
    """Of one that was killed without a word, its last sign of life."""
    if attempt.end is not None:
        return attempt.end
    log = events.of_attempt(run.attempt(attempt.n))
    row = metrics.newest_row(run, attempt.n) or {}
    return max([float(e["t"]) for e in log[-1:]] + [float(row.get("t") or 0.0)], default=0.0)


def _ranks_of(run: RunDir, attempt: Attempt) -> int | None:
    session = events.last(events.of_attempt(run.attempt(attempt.n)), "session_started")
    return int(session["world_size"]) if session else None


def of_run(run: RunDir, contract: ContractSpec, now: float | None) -> Used:
    """As :func:`used`, of all attempts that there are."""
    return used(run, attempts.read_all(run), now, contract.gpu_hour_cost)

"""The budget of a run and its usage so far, over all attempts.

The time in which the job held its nodes counts: each GPU from the start of an attempt to its end. On CPUs a rank counts
as a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from clustertrain.config.contract import ContractSpec
from clustertrain.run import attempts, event_types, events, json_files, metrics
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir


class BudgetUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that a run has used."""

    gpu_hours: float = 0.0
    """Hours of all attempts times their ranks."""
    wall_hours: float = 0.0
    """Hours for which attempts held their nodes."""
    cost: float = 0.0
    """`gpu_hours` at the price `contract.gpu_hour_cost`, in its currency."""

    def add(self, seconds: float, gpus: int, gpu_hour_cost: float) -> BudgetUsage:
        hours = max(0.0, seconds) / 3600
        return BudgetUsage(
            gpu_hours=self.gpu_hours + hours * gpus,
            wall_hours=self.wall_hours + hours,
            cost=self.cost + hours * gpus * gpu_hour_cost,
        )


LIMIT_KEYS = ("gpu_hours", "wall_hours", "cost")


def format_spent(contract: ContractSpec, usage: BudgetUsage) -> str:
    """Return a sentence that names the limits reached; empty if none is."""
    reached = [
        f"{getattr(usage, name):.4g} of {name} = {getattr(contract, name):g}"
        for name in LIMIT_KEYS
        if getattr(contract, name) and getattr(usage, name) >= getattr(contract, name)
    ]
    return f"the budget is spent: {', '.join(reached)}" if reached else ""


def remaining(contract: ContractSpec, usage: BudgetUsage) -> dict[str, float]:
    """Return what is left of each limit that the contract sets."""
    return {n: max(0.0, limit - getattr(usage, n)) for n in LIMIT_KEYS if (limit := getattr(contract, n))}


def compute_usage(run: RunDir, history: Sequence[Attempt], now: float | None, gpu_hour_cost: float) -> BudgetUsage:
    """Return the usage of the attempts in ``history``.

    ``now`` (UTC epoch s) is given if the last one may be running.
    """
    usage = BudgetUsage()
    for span in list_spans(run, history, now):
        usage = usage.add(span.end - span.start, span.gpus, gpu_hour_cost)
    return usage


class Span(NamedTuple):
    """The time of one attempt (UTC epoch s), and the number of its ranks."""

    start: float
    end: float
    gpus: int


def list_spans(run: RunDir, history: Sequence[Attempt], now: float | None) -> list[Span]:
    """Return when the attempts in ``history`` held their nodes; ``now`` as for :func:`compute_usage`."""
    spans = []
    plan = json_files.load_document(run.plan, {"world_size": float}).value
    ranks = int(plan.get("world_size") or 1)
    for i, attempt in enumerate(history):
        if attempt.start is None:
            continue
        next_start = next((a.start for a in history[i + 1 :] if a.start is not None), math.inf)
        if now is not None and i == len(history) - 1 and attempt.end is None:
            end = now
        else:
            end = min(_find_attempt_end(run, attempt), next_start)
        spans.append(Span(attempt.start, max(attempt.start, end), _find_world_size(run, attempt) or ranks))
    return spans


def _find_attempt_end(run: RunDir, attempt: Attempt) -> float:
    """Return the end of an attempt (UTC epoch s); if nothing recorded it, the time of the last event or row."""
    if attempt.end is not None:
        return attempt.end
    log = events.for_attempt(run.attempt(attempt.n))
    row = metrics.find_newest_row(run, attempt.n) or {}
    return max([float(e["t"]) for e in log[-1:]] + [float(row.get("t") or 0.0)], default=0.0)


def _find_world_size(run: RunDir, attempt: Attempt) -> int | None:
    session = events.select_last(events.for_attempt(run.attempt(attempt.n)), event_types.SessionStarted)
    return session.world_size if session else None


def compute_run_usage(run: RunDir, contract: ContractSpec, now: float | None) -> BudgetUsage:
    """Return the usage of all attempts. See :func:`compute_usage`."""
    return compute_usage(run, attempts.load_attempts(run), now, contract.gpu_hour_cost)

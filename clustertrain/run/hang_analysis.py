"""Find the rank that a timed-out collective waited for, from the outcomes of all ranks.

The ranks that report the timeout are those that waited; they are never the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from clustertrain.run.results import RankOutcome

_MAX_NAMED = 8


class _RankOnNode(NamedTuple):
    node: str
    outcome: RankOutcome

    @property
    def last_step(self) -> int | None:
        last_seen = self.outcome.last_seen
        return None if last_seen is None else last_seen.step


def describe_hang(outcomes: Mapping[str, Sequence[RankOutcome]]) -> str:
    """Return one sentence that names the rank that hung. ``outcomes`` holds those of all ranks, by node."""
    ranks = [_RankOnNode(node, outcome) for node, members in outcomes.items() for outcome in members]
    for node, outcome in ranks:
        if outcome.ended_by_agent and outcome.error is not None:
            return f"{outcome.error.message} ({node})"
    waiting = [r for r in ranks if r.outcome.kind in ("hang", "communication")]
    killed = [r for r in ranks if r.outcome.kind == "killed"]
    hang_step = max((r.last_step for r in waiting if r.last_step is not None), default=None)
    waiters = _format_ranks(waiting) if waiting else "the ranks"
    message = f"{waiters} waited in a collective until it timed out"
    if hang_step is not None:
        message += f", at step {hang_step + 1}"
    missing = _find_missing(killed, hang_step)
    if missing:
        return f"{message}; {_format_ranks(missing)} did not reach it: {_format_location(missing[0])}"
    if killed:
        message += f"; {_format_ranks(killed)} left no record"
    return f"{message}; it is unknown which rank did not reach it"


def _find_missing(killed: Sequence[_RankOnNode], hang_step: int | None) -> Sequence[_RankOnNode]:
    """Return the ranks without a record that the others waited for; empty if that cannot be determined.

    Some of the killed ranks may have waited as well, and have been ended before their own timeout.
    """
    stopped = [r for r in killed if r.outcome.last_seen is not None and r.outcome.last_seen.stopped]
    lagging = [r for r in killed if hang_step is not None and r.last_step is not None and r.last_step < hang_step]
    return stopped or lagging or (killed if len(killed) == 1 else [])


def _format_location(rank: _RankOnNode) -> str:
    last_seen = rank.outcome.last_seen
    parts = [f"last seen on {rank.node}"]
    if last_seen is not None and last_seen.step is not None:
        parts.append(f"in step {last_seen.step + 1}, phase {last_seen.phase}")
    if last_seen is not None and last_seen.stopped:
        parts.append("its process stopped (SIGSTOP, or a debugger)")
    return ", ".join([*parts, f"see logs/rank-{rank.outcome.rank}.log"])


def _format_ranks(ranks: Sequence[_RankOnNode]) -> str:
    numbers = sorted(r.outcome.rank for r in ranks)
    if len(numbers) > _MAX_NAMED:
        return f"{len(numbers)} ranks"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"

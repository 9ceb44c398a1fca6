"""Whom a collective that timed out waited for, from what all ranks left behind.

The ranks that report the timeout are those that waited. They are never the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_NAMED = 8


def describe_hang(nodes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One sentence. ``nodes``: by name, the ranks of ``results/<node>.json``."""
    ranks = [{**rank, "node": node} for node, members in nodes.items() for rank in members]
    ended_rank = next((r for r in ranks if r.get("ended_by_agent")), None)
    if ended_rank is not None:
        return f"{ended_rank['error']['message']} ({ended_rank['node']})"
    waiting = [r for r in ranks if r.get("kind") in ("hang", "communication")]
    killed = [r for r in ranks if r.get("kind") == "killed"]
    hang_step = max((step for r in waiting if (step := _last_step(r)) is not None), default=None)
    waiters = _format_ranks(waiting) if waiting else "the ranks"
    message = f"{waiters} waited in a collective until it timed out"
    if hang_step is not None:
        message += f", at step {hang_step + 1}"
    missing = _find_missing(killed, hang_step)
    if missing:
        return f"{message}; {_format_ranks(missing)} did not come: {_format_location(missing[0])}"
    if killed:
        message += f"; {_format_ranks(killed)} left no record"
    return f"{message}; which rank did not come is not known"


def _find_missing(killed: Sequence[dict[str, Any]], hang_step: int | None) -> Sequence[dict[str, Any]]:
    """Which of the ranks that left no record the others waited for; empty where that cannot be told. Some of them may
    have waited as well, and have been ended before their own timeout."""
    stopped_ranks = [r for r in killed if (r.get("last_seen") or {}).get("stopped")]
    lagging = [r for r in killed if hang_step is not None and (step := _last_step(r)) is not None and step < hang_step]
    return stopped_ranks or lagging or (killed if len(killed) == 1 else [])


def _last_step(rank: Mapping[str, Any]) -> int | None:
    step = (rank.get("last_seen") or {}).get("step")
    return int(step) if step is not None else None


def _format_location(rank: Mapping[str, Any]) -> str:
    last_seen = rank.get("last_seen") or {}
    parts = [f"last seen on {rank['node']}"]
    if last_seen.get("step") is not None:
        parts.append(f"in step {last_seen['step'] + 1}, phase {last_seen['phase']}")
    if last_seen.get("stopped"):
        parts.append("its process stopped (SIGSTOP, or a debugger)")
    return ", ".join([*parts, f"see logs/rank-{rank['rank']}.log"])


def _format_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    numbers = sorted(int(r["rank"]) for r in ranks)
    if len(numbers) > _MAX_NAMED:
        return f"{len(numbers)} ranks"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"

"""Whom a collective that timed out waited for, from what all ranks left behind.

The ranks that report the timeout are those that waited. They are never the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_NAMED = 8


def words(nodes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One sentence. ``nodes``: by name, the ranks of ``results/<node>.json``."""
    ranks = [{**rank, "node": node} for node, members in nodes.items() for rank in members]
    ended = next((r for r in ranks if r.get("ended_by_agent")), None)
    if ended is not None:
        return f"{ended['error']['message']} ({ended['node']})"
    waited = [r for r in ranks if r.get("kind") in ("hang", "communication")]
    silent = [r for r in ranks if r.get("kind") == "killed"]
    at = max((step for r in waited if (step := _step(r)) is not None), default=None)
    who = _names(waited) if waited else "the ranks"
    head = f"{who} waited in a collective until it timed out"
    if at is not None:
        head += f", at step {at + 1}"
    missing = _missing(silent, at)
    if missing:
        return f"{head}; {_names(missing)} did not come: {_where(missing[0])}"
    if silent:
        head += f"; {_names(silent)} left no record"
    return f"{head}; which rank did not come is not known"


def _missing(silent: Sequence[dict[str, Any]], at: int | None) -> Sequence[dict[str, Any]]:
    """Which of the ranks that left no record the others waited for; empty where that cannot be told. Some of them may
    have waited as well, and have been ended before their own timeout."""
    stopped = [r for r in silent if (r.get("last_seen") or {}).get("stopped")]
    behind = [r for r in silent if at is not None and (step := _step(r)) is not None and step < at]
    return stopped or behind or (silent if len(silent) == 1 else [])


def _step(rank: Mapping[str, Any]) -> int | None:
    step = (rank.get("last_seen") or {}).get("step")
    return int(step) if step is not None else None


def _where(rank: Mapping[str, Any]) -> str:
    seen = rank.get("last_seen") or {}
    parts = [f"last seen on {rank['node']}"]
    if seen.get("step") is not None:
        parts.append(f"in step {seen['step'] + 1}, phase {seen['phase']}")
    if seen.get("stopped"):
        parts.append("its process stopped (SIGSTOP, or a debugger)")
    return ", ".join([*parts, f"see logs/rank-{rank['rank']}.log"])


def _names(ranks: Sequence[Mapping[str, Any]]) -> str:
    numbers = sorted(int(r["rank"]) for r in ranks)
    if len(numbers) > _MOST_NAMED:
        return f"{len(numbers)} ranks"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"

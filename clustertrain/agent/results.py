"""How a node's ranks ended: read from their records, judged, written as ``results/<node>.json``."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED

# Which kind of failure explains the others: a rank that raised or crashed makes its peers' collectives fail.
_EXPLAINS = ("environment", "out_of_memory", "user_error", "device", "storage", "hang", "crashed", "communication")
# torchrun says so when it had started the ranks and they died: then they explain the failure, not torchrun.
_RANKS_DIED = "ChildFailedError"
_DIED_OF = re.compile(r"\brank +: (\d+)\b.*\n +exitcode +: -(\d+)\b")
# What a process does to itself. Not SIGABRT: NCCL's watchdog aborts a rank whose peer is gone.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_PORT_TAKEN = ("eaddrinuse", "address already in use")


@dataclass(frozen=True)
class NodeResult:
    node: str
    node_rank: int
    ending: str  # completed, stopped, failed
    # Of a failure: environment, out_of_memory, user_error, device, storage, hang, crashed, communication, launcher,
    # killed or unknown.
    kind: str | None
    exit_code: int
    step: int | None
    committed_step: int | None
    message: str | None
    ranks: Sequence[Mapping[str, Any]]
    why: str | None = None  # it ended as it did, where that is not plain
    spent: bool = False  # the run's budget is

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "ranks": list(self.ranks)}


def read_ranks(folder: Path, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The records that exist, by rank."""
    found = {r: fsio.read_json(folder / f"rank-{r}.json") for r in ranks}
    return {r: record for r, record in found.items() if record is not None}


def judge(
    node: str,
    node_rank: int,
    ranks: Sequence[int],
    records: Mapping[int, Mapping[str, Any]],
    log_tail: str | None = None,
) -> NodeResult:
    """One verdict for the node. A rank without a record crashed or was killed; "completed" needs all of them.

    ``log_tail`` is the end of what torchrun printed: where it failed before any rank began, nothing else tells why, nor
    does anything else tell of what a rank without a record died.
    """
    crashes = _crashes(log_tail or "")
    full = [records.get(r) or _without_record(r, crashes.get(r)) for r in ranks]
    endings = {str(r["ending"]) for r in full}
    steps = [int(r["step"]) for r in full if r.get("step") is not None]
    committed = [int(r["committed_step"]) for r in full if r.get("committed_step") is not None]
    common: dict[str, Any] = {
        "node": node,
        "node_rank": node_rank,
        "step": max(steps, default=None),
        "committed_step": max(committed, default=None),
        "why": next((str(r["why"]) for r in full if r.get("why")), None),
        "spent": any(r.get("spent") for r in full),
        "ranks": full,
    }
    if endings == {"completed"}:
        return NodeResult(ending="completed", kind=None, exit_code=EXIT_DONE, message=None, **common)
    if endings == {"stopped"}:
        return NodeResult(ending="stopped", kind=None, exit_code=EXIT_STOPPED, message=None, **common)
    said_by_torchrun = _launcher_failure(log_tail) if log_tail and not records else None
    if said_by_torchrun is not None:
        kind, line = said_by_torchrun
        message = f"torchrun on {node} failed: {line} (see logs/agent-{node}.log)"
        return NodeResult(ending="failed", kind=kind, exit_code=EXIT_FAILED, message=message, **common)
    failed = [r for r in full if r["ending"] == "failed"] or full
    kinds = {str(r.get("kind") or "unknown") for r in failed}
    kind = next((k for k in (*_EXPLAINS, "killed") if k in kinds), "unknown")
    culprit = next((r for r in failed if (r.get("kind") or "unknown") == kind), failed[0])
    error = culprit.get("error")
    said = f"{error['type']}: {error['message']}" if error else "it was killed before it could say why"
    message = f"rank {culprit['rank']} on {node}: {said}"
    code = EXIT_CONFIG if kind == "environment" else EXIT_FAILED
    return NodeResult(ending="failed", kind=kind, exit_code=code, message=message, **common)


def _crashes(tail: str) -> dict[int, str]:
    """The signal's name, by rank."""
    found = {int(rank): int(number) for rank, number in _DIED_OF.findall(tail)}
    return {rank: signal.Signals(number).name for rank, number in found.items() if number in _CRASHES}


def _without_record(rank: int, crash: str | None) -> dict[str, Any]:
    error = {"type": crash, "message": f"the stacks of its threads are at the end of logs/rank-{rank}.log"}
    kind = "killed" if crash is None else "crashed"
    return {"rank": rank, "ending": "failed", "kind": kind, "error": None if crash is None else error}


def _launcher_failure(tail: str) -> tuple[str, str] | None:
    """The kind and the last line of words of a torchrun that failed by itself; None where it does not say so."""
    lines = [line.strip() for line in tail.splitlines() if any(c.isalnum() for c in line)]
    if not lines:
        return None
    if any(words in tail.lower() for words in _PORT_TAKEN):
        return "communication", lines[-1]
    return None if _RANKS_DIED in tail else ("launcher", lines[-1])

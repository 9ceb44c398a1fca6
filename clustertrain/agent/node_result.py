"""How a node's ranks ended: read from their records, judged, written as ``results/<node>.json``."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_STOPPED, EXIT_SUCCESS
from clustertrain.run import hang_analysis
from clustertrain.run.heartbeat import Heartbeat, phase_name

# Which kind of failure explains the others: a rank that raised or crashed makes its peers' collectives fail.
_KIND_PRIORITY = (
    "environment", "out_of_memory", "user_error", "device", "storage", "hang", "crashed", "exited", "communication"
)  # fmt: skip
# torchrun says so when it had started the ranks and they died: then they explain the failure, not torchrun.
_CHILD_FAILED = "ChildFailedError"
_FAILURE_TABLE = "Failures:"  # of torchrun, with all ranks of the node that did not exit with 0
_EXIT_CODE = re.compile(r"\brank +: (\d+)\b.*\n +exitcode +: (-?\d+)\b")
# What a process does to itself. Not SIGABRT: NCCL's watchdog aborts a rank whose peer is gone.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_PORT_TAKEN = ("eaddrinuse", "address already in use")
_NO_RESULT_REASON = "the script ended with exit code 0 after it was asked to stop, and no session said that it was done"


@dataclass(frozen=True)
class RankObservations:
    """What the agent saw of its ranks besides their records.

    ``launcher_exit_code``: the exit code of torchrun (negative: the signal that killed it), None where the agent ended
    it.
    ``log_tail``: the end of what torchrun printed: where it failed before any rank began, nothing else tells why, nor
    does anything else tell how a rank without a record ended. ``finished_records``: the ranks whose session was left
    with all steps
    done. ``stopped_ranks``: the ranks whose processes were stopped, as by SIGSTOP, when another one failed.
    ``hung_ranks``: the ranks that the agent ended because they did nothing any more after all others had completed.
    """

    launcher_exit_code: int | None = None
    log_tail: str | None = None
    stop_requested: bool = False  # before the ranks had ended
    finished_records: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    heartbeats: Mapping[int, Heartbeat] = field(default_factory=dict)
    stopped_ranks: frozenset[int] = frozenset()
    hung_ranks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class NodeResult:
    node: str
    node_rank: int
    ending: str  # completed, stopped, failed
    # Of a failure: environment, out_of_memory, user_error, device, storage, hang, crashed, exited, communication,
    # launcher, killed or unknown.
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


def read_rank_records(folder: Path, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The records that exist, by rank."""
    return _read_records(folder, "rank", ranks)


def read_finished_records(folder: Path, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By rank, what a session that was left with all steps done has written: the record, if nothing happens to it."""
    return _read_records(folder, "left", ranks)


def _read_records(folder: Path, name: str, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    records = {r: fsio.read_json(folder / f"{name}-{r}.json") for r in ranks}
    return {r: record for r, record in records.items() if record is not None}


def build_node_result(
    node: str,
    node_rank: int,
    ranks: Sequence[int],
    records: Mapping[int, Mapping[str, Any]],
    observations: RankObservations = RankObservations(),
) -> NodeResult:
    """One verdict for the node. A rank without a record ended by itself, crashed or was killed; "completed" needs all
    of them."""
    codes = _exit_codes(observations, ranks)
    rank_records = [
        {**_rank_record(r, records, codes.get(r), observations), "last_seen": _last_seen(r, observations)}
        for r in ranks
    ]
    endings = {str(r["ending"]) for r in rank_records}
    steps = [int(r["step"]) for r in rank_records if r.get("step") is not None]
    committed = [int(r["committed_step"]) for r in rank_records if r.get("committed_step") is not None]
    common: dict[str, Any] = {
        "node": node,
        "node_rank": node_rank,
        "step": max(steps, default=None),
        "committed_step": max(committed, default=None),
        "why": next((str(r["why"]) for r in rank_records if r.get("why")), None),
        "spent": any(r.get("spent") for r in rank_records),
        "ranks": rank_records,
    }
    if endings == {"completed"}:
        return NodeResult(ending="completed", kind=None, exit_code=EXIT_SUCCESS, message=None, **common)
    if "failed" not in endings:
        return NodeResult(ending="stopped", kind=None, exit_code=EXIT_STOPPED, message=None, **common)
    kind, message = _launcher_failure(node, observations, records) or _rank_failure(node, rank_records)
    code = EXIT_CONFIG if kind == "environment" else EXIT_FAILED
    return NodeResult(ending="failed", kind=kind, exit_code=code, message=message, **common)


def _rank_failure(node: str, rank_records: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Kind and message of the rank that explains the failure."""
    failed = [r for r in rank_records if r["ending"] == "failed"]
    kinds = {str(r.get("kind") or "unknown") for r in failed}
    kind = next((k for k in (*_KIND_PRIORITY, "killed") if k in kinds), "unknown")
    if kind == "hang":
        return kind, hang_analysis.describe_hang({node: rank_records})
    culprit = next((r for r in failed if (r.get("kind") or "unknown") == kind), failed[0])
    error = culprit.get("error")
    reason = f"{error['type']}: {error['message']}" if error else "it was killed before it could say why"
    return kind, f"rank {culprit['rank']} on {node}: {reason}"


def _exit_codes(observations: RankObservations, ranks: Sequence[int]) -> dict[int, int]:
    """By rank, as torchrun saw them (negative: of a signal); without those that are not known."""
    tail = observations.log_tail or ""
    codes = {int(rank): int(code) for rank, code in _EXIT_CODE.findall(tail)}
    if observations.launcher_exit_code == 0 or (_CHILD_FAILED in tail and _FAILURE_TABLE in tail):
        codes = dict.fromkeys(ranks, 0) | codes
    return codes


def _rank_record(
    rank: int, records: Mapping[int, Mapping[str, Any]], exit_code: int | None, observations: RankObservations
) -> Mapping[str, Any]:
    record = records.get(rank)
    if record is None:
        return _infer_record(rank, exit_code, observations)
    if observations.stop_requested and record["ending"] == "completed" and not record.get("finished", True):
        return {**record, "ending": "stopped", "why": record.get("why") or _NO_RESULT_REASON, "by_script": True}
    return record


def _infer_record(rank: int, exit_code: int | None, observations: RankObservations) -> Mapping[str, Any]:
    finished = observations.finished_records.get(rank)
    if rank in observations.hung_ranks:
        message = f"rank {rank} did nothing any more after all others had completed, and was ended"
        if finished is not None:
            return {**finished, "why": f"all steps were done; {message}"}
        return _failed_record(rank, "hang", {"type": "hang", "message": message}) | {"ended_by_agent": True}
    if exit_code == 0:
        if finished is not None:
            return finished
        if observations.stop_requested:
            return {"rank": rank, "ending": "stopped", "why": _NO_RESULT_REASON, "by_script": True}
        message = (
            "ended with exit code 0 before its script had returned (os._exit?)\n"
            "  fix: let the script return or call sys.exit(0), so that what it has done counts"
        )
        return _failed_record(rank, "user_error", {"type": "no result", "message": message})
    if exit_code is not None and exit_code > 0:
        message = f"ended with exit code {exit_code} without an error of Python's (os._exit?): see logs/rank-{rank}.log"
        return _failed_record(rank, "exited", {"type": "no result", "message": message})
    if exit_code is not None and -exit_code in _CRASHES:
        message = f"the stacks of its threads are at the end of logs/rank-{rank}.log"
        return _failed_record(rank, "crashed", {"type": signal.Signals(-exit_code).name, "message": message})
    return _failed_record(rank, "killed", None)


def _failed_record(rank: int, kind: str, error: dict[str, str] | None) -> dict[str, Any]:
    return {"rank": rank, "ending": "failed", "kind": kind, "error": error}


def _last_seen(rank: int, observations: RankObservations) -> dict[str, Any] | None:
    """Where the rank was by its own beat; ``step``: steps done."""
    beat = observations.heartbeats.get(rank)
    position = {} if beat is None else {"step": beat.step, "phase": phase_name(beat.phase)}
    stopped = {"stopped": True} if rank in observations.stopped_ranks else {}
    return {**position, **stopped} or None


def _launcher_failure(
    node: str, observations: RankObservations, records: Mapping[int, Mapping[str, Any]]
) -> tuple[str, str] | None:
    """Kind and message of a torchrun that was killed or failed by itself; None where the ranks explain the failure."""
    code = observations.launcher_exit_code or 0
    if code < 0 and not any(r["ending"] == "failed" for r in records.values()):
        return "launcher", f"torchrun on {node} was killed by {signal.Signals(-code).name}"
    if code <= 0 or records:
        return None
    tail = observations.log_tail or ""
    lines = [line.strip() for line in tail.splitlines() if any(c.isalnum() for c in line)]
    port_taken = any(phrase in tail.lower() for phrase in _PORT_TAKEN)
    if not lines or (_CHILD_FAILED in tail and not port_taken):
        return None
    message = f"torchrun on {node} failed: {lines[-1]} (see logs/agent-{node}.log)"
    return "communication" if port_taken else "launcher", message

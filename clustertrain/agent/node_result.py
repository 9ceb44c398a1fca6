"""Derive the result of a node from the records of its ranks and from what the agent observed."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from clustertrain import fsio
from clustertrain.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_STOPPED, EXIT_SUCCESS
from clustertrain.run import hang_analysis
from clustertrain.run.heartbeat import Heartbeat, phase_name
from clustertrain.run.results import (
    ErrorInfo,
    FailureKind,
    LastSeen,
    NodeResult,
    RankEnding,
    RankOutcome,
    RankResult,
    parse_rank_result,
    sort_failures,
)

# torchrun prints this after ranks that it started died: then the ranks explain the failure, not torchrun.
_CHILD_FAILED = "ChildFailedError"
_FAILURE_TABLE = "Failures:"  # torchrun's table of the ranks that did not exit with 0
_EXIT_CODE = re.compile(r"\brank +: (\d+)\b.*\n +exitcode +: (-?\d+)\b")
# Signals that a process raises itself. Not SIGABRT: NCCL's watchdog aborts a rank whose peer is gone.
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_PORT_TAKEN = ("eaddrinuse", "address already in use")
_NO_RESULT_REASON = "the script ended with exit code 0 after a stop request, without a finished session"


@dataclass(frozen=True)
class RankObservations:
    """What the agent observed of its ranks, apart from their records."""

    launcher_exit_code: int | None = None
    """Exit code of torchrun (negative: the signal that killed it); None if the agent ended it."""
    log_tail: str | None = None
    """The end of torchrun's output: the only explanation of a failure before the ranks started, and of how a rank
    without a record ended."""
    stop_requested: bool = False
    """A stop was requested before the ranks ended."""
    finished_records: Mapping[int, RankResult] = field(default_factory=dict)
    """By rank, the records of sessions that closed with all steps done."""
    heartbeats: Mapping[int, Heartbeat] = field(default_factory=dict)
    stopped_ranks: frozenset[int] = frozenset()
    """Ranks whose processes were stopped, for example by SIGSTOP, when another rank failed."""
    hung_ranks: frozenset[int] = frozenset()
    """Ranks that the agent ended because they were idle after all others had completed."""


def read_rank_records(folder: Path, ranks: Sequence[int]) -> dict[int, RankResult]:
    """Return the records that exist, by rank."""
    return _read_records(folder, "rank", ranks)


def read_finished_records(folder: Path, ranks: Sequence[int]) -> dict[int, RankResult]:
    """Return, by rank, the record that a session left when it closed with all steps done.

    It stands in for the rank's record if the process ends before it writes that one.
    """
    return _read_records(folder, "finished", ranks)


def _read_records(folder: Path, name: str, ranks: Sequence[int]) -> dict[int, RankResult]:
    records = {r: parse_rank_result(fsio.read_json(folder / f"{name}-{r}.json")) for r in ranks}
    return {r: record for r, record in records.items() if record is not None}


def build_node_result(
    node: str,
    node_rank: int,
    ranks: Sequence[int],
    records: Mapping[int, RankResult],
    observations: RankObservations = RankObservations(),
) -> NodeResult:
    """Return one result for the node; it is "completed" only if all ranks completed.

    A rank without a record ended its own process, crashed or was killed.
    """
    codes = _exit_codes(observations, ranks)
    outcomes = tuple(
        msgspec.structs.replace(
            _rank_outcome(r, records, codes.get(r), observations), last_seen=_last_seen(r, observations)
        )
        for r in ranks
    )
    endings = {o.ending for o in outcomes}
    ending: RankEnding = "completed" if endings == {"completed"} else "failed" if "failed" in endings else "stopped"
    kind, message, exit_code = None, None, EXIT_SUCCESS if ending == "completed" else EXIT_STOPPED
    if ending == "failed":
        kind, message = _launcher_failure(node, observations, records) or _rank_failure(node, outcomes)
        exit_code = EXIT_CONFIG if kind == "environment" else EXIT_FAILED
    return NodeResult(
        node=node,
        node_rank=node_rank,
        ending=ending,
        kind=kind,
        exit_code=exit_code,
        step=max((o.step for o in outcomes if o.step is not None), default=None),
        committed_step=max((o.committed_step for o in outcomes if o.committed_step is not None), default=None),
        message=message,
        ranks=outcomes,
        reason=next((o.reason for o in outcomes if o.reason), None),
        budget_spent=any(o.budget_spent for o in outcomes),
    )


def _rank_failure(node: str, outcomes: Sequence[RankOutcome]) -> tuple[FailureKind, str]:
    """Return the kind and message of the rank that explains the failure."""
    culprit = sort_failures(outcomes)[0]
    kind: FailureKind = culprit.kind or "unknown"
    if kind == "hang":
        return kind, hang_analysis.describe_hang({node: outcomes})
    error = culprit.error
    reason = f"{error.type}: {error.message}" if error else "it was killed and left no record"
    return kind, f"rank {culprit.rank} on {node}: {reason}"


def _exit_codes(observations: RankObservations, ranks: Sequence[int]) -> dict[int, int]:
    """Return the known exit codes that torchrun reported, by rank (negative: a signal)."""
    tail = observations.log_tail or ""
    codes = {int(rank): int(code) for rank, code in _EXIT_CODE.findall(tail)}
    if observations.launcher_exit_code == 0 or (_CHILD_FAILED in tail and _FAILURE_TABLE in tail):
        codes = dict.fromkeys(ranks, 0) | codes
    return codes


def _rank_outcome(
    rank: int, records: Mapping[int, RankResult], exit_code: int | None, observations: RankObservations
) -> RankOutcome:
    record = records.get(rank)
    if record is None:
        return _infer_outcome(rank, exit_code, observations)
    outcome = _to_outcome(record)
    if observations.stop_requested and record.ending == "completed" and not record.finished:
        reason = record.reason or _NO_RESULT_REASON
        return msgspec.structs.replace(outcome, ending="stopped", reason=reason, ended_by_script=True)
    return outcome


def _to_outcome(record: RankResult) -> RankOutcome:
    return RankOutcome(**msgspec.structs.asdict(record))


def _infer_outcome(rank: int, exit_code: int | None, observations: RankObservations) -> RankOutcome:
    """Return how a rank without a record ended."""
    finished = observations.finished_records.get(rank)
    if rank in observations.hung_ranks:
        message = f"rank {rank} was idle after all others had completed, and was ended"
        if finished is not None:
            return msgspec.structs.replace(_to_outcome(finished), reason=f"all steps were done; {message}")
        hang = _to_outcome(failed_record(rank, "hang", ErrorInfo(type="hang", message=message)))
        return msgspec.structs.replace(hang, ended_by_agent=True)
    if exit_code == 0 and finished is not None:
        return _to_outcome(finished)
    if exit_code == 0 and observations.stop_requested:
        return RankOutcome(rank=rank, ending="stopped", finished=False, reason=_NO_RESULT_REASON, ended_by_script=True)
    return _to_outcome(_infer_failure(rank, exit_code))


def _infer_failure(rank: int, exit_code: int | None) -> RankResult:
    if exit_code is None or (exit_code < 0 and -exit_code not in CRASH_SIGNALS):
        return failed_record(rank, "killed", None)
    if exit_code == 0:
        message = (
            "ended with exit code 0 before its script returned (os._exit?)\n"
            "  fix: let the script return or call sys.exit(0), so that its work counts"
        )
        return failed_record(rank, "error", ErrorInfo(type="no result", message=message))
    if exit_code > 0:
        message = f"ended with exit code {exit_code} without a Python error (os._exit?): see logs/rank-{rank}.log"
        return failed_record(rank, "exited", ErrorInfo(type="no result", message=message))
    message = f"the stacks of its threads are at the end of logs/rank-{rank}.log"
    return failed_record(rank, "crashed", ErrorInfo(type=signal.Signals(-exit_code).name, message=message))


def failed_record(rank: int, kind: FailureKind, error: ErrorInfo | None, *, exit_code: int | None = None) -> RankResult:
    """Return the record of a rank that failed without writing one."""
    return RankResult(rank=rank, ending="failed", finished=False, exit_code=exit_code, kind=kind, error=error)


def stopped_record(rank: int, reason: str) -> RankResult:
    """Return the record of a rank that was stopped without writing one."""
    return RankResult(rank=rank, ending="stopped", finished=False, reason=reason)


def _last_seen(rank: int, observations: RankObservations) -> LastSeen | None:
    beat = observations.heartbeats.get(rank)
    stopped = rank in observations.stopped_ranks
    if beat is None:
        return LastSeen(stopped=True) if stopped else None
    return LastSeen(step=beat.step, phase=phase_name(beat.phase), stopped=stopped)


def _launcher_failure(
    node: str, observations: RankObservations, records: Mapping[int, RankResult]
) -> tuple[FailureKind, str] | None:
    """Return kind and message if torchrun itself was killed or failed; None if the ranks explain the failure."""
    code = observations.launcher_exit_code or 0
    if code < 0 and not any(r.ending == "failed" for r in records.values()):
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

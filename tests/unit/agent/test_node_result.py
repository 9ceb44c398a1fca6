"""A node's result, built from its ranks' records and what the agent observed."""

from __future__ import annotations

import pytest

from clustertrain.agent.node_result import RankObservations, build_node_result, failed_record
from clustertrain.run.heartbeat import TRAIN, Heartbeat
from clustertrain.run.results import ErrorInfo, FailureKind, RankResult

NO_TORCH = "/opt/python: Error while finding module specification\nModuleNotFoundError: No module named 'torch'\n\n"
PORT_TAKEN = "Traceback\nRuntimeError: The server socket has failed to bind. code: EADDRINUSE, reason: port 12345\n"
RANKS_DIED = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    "  exitcode  : -9 (pid: 17)\n  traceback : Signal 9 (SIGKILL) received by PID 17\n=====\n"
)


@pytest.mark.parametrize(
    ("tail", "kind", "text"),
    [
        (NO_TORCH, "launcher", "torchrun on a failed: ModuleNotFoundError: No module named 'torch'"),
        (PORT_TAKEN, "communication", "torchrun on a failed: RuntimeError: The server socket"),
        ("OSError: [Errno 98] Address already in use", "communication", "torchrun on a failed: OSError"),
        (RANKS_DIED, "killed", "killed and left no record"),
        ("=====\n", "killed", "killed and left no record"),
        ("", "killed", "killed and left no record"),
        (None, "killed", "killed and left no record"),
    ],
    ids=["no-torch", "port-taken", "port-taken-oserror", "ranks-died", "no-message", "empty", "no-log"],
)
def test_kind_of_a_torchrun_failure_comes_from_its_log(tail: str | None, kind: str, text: str) -> None:
    result = build_node_result("a", 0, [0, 1], {}, RankObservations(launcher_exit_code=1, log_tail=tail))
    assert (result.ending, result.kind, result.exit_code) == ("failed", kind, 1)
    assert result.message is not None and text in result.message
    assert ("see logs/agent-a.log" in result.message) is (kind != "killed")


def test_rank_record_outweighs_the_torchrun_log() -> None:
    records = {0: failed_record(0, "error", ErrorInfo(type="ValueError", message="no"))}
    result = build_node_result("a", 0, [0, 1], records, RankObservations(launcher_exit_code=1, log_tail=PORT_TAKEN))
    assert result.kind == "error"
    assert result.message == "rank 0 on a: ValueError: no"


CRASHED = """
Failures:
[0]:
  time      : 2026-11-23_10:00:00
  host      : a
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 17)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 17
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-11-23_10:00:00
  host      : a
  rank      : 1 (local_rank: 1)
  exitcode  : -11 (pid: 18)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 18
torch.distributed.elastic.multiprocessing.errors.ChildFailedError
"""


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (None, "rank 1 on a: SIGSEGV: the stacks of its threads are at the end of logs/rank-1.log"),
        ("communication", "rank 1 on a: SIGSEGV: the stacks of its threads are at the end of logs/rank-1.log"),
        ("error", "rank 0 on a: E: detail"),
    ],
    ids=["no-record", "communication", "user-error"],
)
def test_crash_outweighs_communication_errors_but_not_errors(peer: FailureKind | None, message: str) -> None:
    records = {0: failed_record(0, peer, ErrorInfo(type="E", message="detail"))} if peer is not None else {}
    result = build_node_result("a", 0, [0, 1], records, RankObservations(launcher_exit_code=1, log_tail=CRASHED))
    assert (result.ending, result.message) == ("failed", message)
    assert [r.kind for r in result.ranks] == [peer or "killed", "crashed"]


def test_storage_failure_outweighs_communication_errors() -> None:
    kinds: tuple[FailureKind, ...] = ("communication", "storage")
    records = {r: failed_record(r, kind, ErrorInfo(type="E", message=kind)) for r, kind in enumerate(kinds)}
    assert build_node_result("a", 0, [0, 1], records).kind == "storage"


def test_rank_reason_and_budget_reach_the_node_result() -> None:
    first = RankResult(rank=0, ending="stopped", budget_spent=True, reason="too expensive")
    second = RankResult(rank=1, ending="stopped", budget_spent=True)
    result = build_node_result("a", 0, [0, 1], {0: first, 1: second})
    assert (result.ending, result.reason, result.budget_spent) == ("stopped", "too expensive", True)
    assert not build_node_result("a", 0, [0], {0: RankResult(ending="completed")}).budget_spent


WARNING = "W1125 02:00:00 torch/distributed/run.py:851] Setting OMP_NUM_THREADS environment variable\n"


@pytest.mark.parametrize("launcher", [-9, -11])
def test_killed_torchrun_is_reported_by_its_signal(launcher: int) -> None:
    result = build_node_result("a", 0, [0, 1], {}, RankObservations(launcher_exit_code=launcher, log_tail=WARNING))
    assert result.kind == "launcher"
    assert result.message == f"torchrun on a was killed by {'SIGKILL' if launcher == -9 else 'SIGSEGV'}"


def test_torchrun_that_the_agent_ended_is_not_the_cause() -> None:
    assert build_node_result("a", 0, [0], {}, RankObservations(log_tail=WARNING)).kind == "killed"


def test_failed_rank_outweighs_a_killed_torchrun() -> None:
    failed = failed_record(0, "error", ErrorInfo(type="E", message="detail"))
    assert (
        build_node_result("a", 0, [0, 1], {0: failed}, RankObservations(launcher_exit_code=-9)).message
        == "rank 0 on a: E: detail"
    )


TABLE = """
Failures:
  <NO_OTHER_FAILURES>
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 18)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError
"""


def test_exit_codes_of_ranks_without_a_record_are_distinguished() -> None:
    broken = failed_record(0, "communication", ErrorInfo(type="E", message="closed"))
    one = build_node_result(
        "a", 0, [0, 1], {0: broken}, RankObservations(launcher_exit_code=1, log_tail=TABLE.format(1))
    )
    assert one.kind == "exited"
    assert (
        one.message is not None
        and "rank 1 on a: no result: ended with exit code 1 without a Python error" in one.message
    )
    # Rank 0 is not in torchrun's table, so it exited with 0.
    zero = build_node_result("a", 0, [0, 1], {}, RankObservations(launcher_exit_code=1, log_tail=TABLE.format(-9)))
    assert zero.kind == "error"
    assert zero.message is not None and "rank 0 on a: no result: ended with exit code 0 before" in zero.message
    assert build_node_result("a", 0, [0], {}, RankObservations(launcher_exit_code=0)).kind == "error"


def completed(rank: int, finished: bool) -> RankResult:
    return RankResult(rank=rank, ending="completed", finished=finished, step=7, committed_step=7)


@pytest.mark.parametrize(
    ("finished", "stop_requested", "ending"),
    [
        (True, False, "completed"),
        (True, True, "completed"),
        (False, False, "completed"),
        (False, True, "stopped"),
    ],
)
def test_script_is_complete_after_a_stop_only_if_session_finished(
    finished: bool, stop_requested: bool, ending: str
) -> None:
    records = {r: completed(r, finished) for r in (0, 1)}
    result = build_node_result(
        "a", 0, [0, 1], records, RankObservations(launcher_exit_code=0, stop_requested=stop_requested)
    )
    assert (result.ending, result.step, result.kind) == (ending, 7, None)
    assert (result.reason is not None) is (ending == "stopped")


@pytest.mark.parametrize(
    ("observed", "ending"),
    [
        (RankObservations(launcher_exit_code=0, stop_requested=True), "stopped"),
        (RankObservations(launcher_exit_code=0, finished_records={0: completed(0, True)}), "completed"),
        (
            RankObservations(launcher_exit_code=0, stop_requested=True, finished_records={0: completed(0, True)}),
            "completed",
        ),
        (
            RankObservations(
                launcher_exit_code=1,
                finished_records={0: completed(0, True)},
                log_tail=TABLE.format(-11).replace(": 1 (", ": 0 ("),
            ),
            "failed",
        ),
    ],
    ids=["stop-requested", "finished", "finished-and-stop-requested", "crashed"],
)
def test_session_record_decides_the_ending_without_a_rank_record(observed: RankObservations, ending: str) -> None:
    assert build_node_result("a", 0, [0], {}, observed).ending == ending


def test_rank_that_hung_after_its_last_step_completed() -> None:
    result = build_node_result(
        "a",
        0,
        [0, 1],
        {0: completed(0, True)},
        RankObservations(finished_records={1: completed(1, True)}, hung_ranks=frozenset({1})),
    )
    assert result.ending == "completed"
    assert result.reason == "all steps were done; rank 1 was idle after all others had completed, and was ended"
    unfinished = build_node_result(
        "a", 0, [0, 1], {0: completed(0, False)}, RankObservations(hung_ranks=frozenset({1}))
    )
    assert (unfinished.ending, unfinished.kind) == ("failed", "hang")
    assert unfinished.message == "rank 1 was idle after all others had completed, and was ended (a)"


def timed_out(rank: int) -> RankResult:
    error = ErrorInfo(type="RuntimeError", message="[gloo] Timed out waiting 3000ms for recv operation")
    return RankResult(rank=rank, ending="failed", kind="hang", error=error, step=16)


def at(step: int) -> Heartbeat:
    return Heartbeat(step=step, phase=TRAIN)


@pytest.mark.parametrize(
    ("observed", "text"),
    [
        (
            RankObservations(),
            "ranks 0, 2 and 3 waited in a collective until it timed out; rank 1 did not reach it: last seen on a, see ",
        ),
        (
            RankObservations(heartbeats={0: at(16), 1: at(15), 2: at(16), 3: at(16)}),
            "timed out, at step 17; rank 1 did not reach it: last seen on a, in step 16, phase train, "
            "see logs/rank-1.log",
        ),
        (
            RankObservations(heartbeats={r: at(16) for r in range(4)}, stopped_ranks=frozenset({1})),
            "rank 1 did not reach it: last seen on a, in step 17, phase train, its process stopped (SIGSTOP",
        ),
    ],
    ids=["no-heartbeats", "heartbeats", "stopped-process"],
)
def test_hang_names_the_rank_that_missed_the_collective(observed: RankObservations, text: str) -> None:
    result = build_node_result("a", 0, range(4), {r: timed_out(r) for r in (0, 2, 3)}, observed)
    assert result.kind == "hang"
    assert result.message is not None and text in result.message


def test_hang_without_evidence_blames_no_rank() -> None:
    result = build_node_result(
        "a", 0, range(4), {0: timed_out(0)}, RankObservations(heartbeats={r: at(16) for r in range(4)})
    )
    assert result.message == (
        "rank 0 waited in a collective until it timed out, at step 17; ranks 1, 2 and 3 left no record; it is unknown "
        "which rank did not reach it"
    )
    all_waited = build_node_result("a", 0, [0, 1], {r: timed_out(r) for r in (0, 1)})
    assert all_waited.message is not None and "it is unknown which rank did not reach it" in all_waited.message

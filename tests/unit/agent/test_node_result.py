"""The verdict on a node."""

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
    ("tail", "kind", "words"),
    [
        (NO_TORCH, "launcher", "torchrun on a failed: ModuleNotFoundError: No module named 'torch'"),
        (PORT_TAKEN, "communication", "torchrun on a failed: RuntimeError: The server socket"),
        ("OSError: [Errno 98] Address already in use", "communication", "torchrun on a failed: OSError"),
        (RANKS_DIED, "killed", "killed and left no record"),
        ("=====\n", "killed", "killed and left no record"),
        ("", "killed", "killed and left no record"),
        (None, "killed", "killed and left no record"),
    ],
)
def test_a_torchrun_that_failed_by_itself_is_told_by_its_log(tail: str | None, kind: str, words: str) -> None:
    result = build_node_result("a", 0, [0, 1], {}, RankObservations(launcher_exit_code=1, log_tail=tail))
    assert (result.ending, result.kind, result.exit_code) == ("failed", kind, 1)
    assert result.message is not None and words in result.message
    assert ("see logs/agent-a.log" in result.message) is (kind != "killed")


def test_a_rank_that_left_a_record_counts_more_than_the_log() -> None:
    records = {0: failed_record(0, "user_error", ErrorInfo(type="ValueError", message="no"))}
    result = build_node_result("a", 0, [0, 1], records, RankObservations(launcher_exit_code=1, log_tail=PORT_TAKEN))
    assert result.kind == "user_error"
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
    ("peer", "told"),
    [
        (None, "rank 1 on a: SIGSEGV: the stacks of its threads are at the end of logs/rank-1.log"),
        ("communication", "rank 1 on a: SIGSEGV: the stacks of its threads are at the end of logs/rank-1.log"),
        ("user_error", "rank 0 on a: E: said"),
    ],
)
def test_a_rank_that_crashed_explains_broken_collectives_and_is_explained_by_an_error(
    peer: FailureKind | None, told: str
) -> None:
    records = {0: failed_record(0, peer, ErrorInfo(type="E", message="said"))} if peer is not None else {}
    found = build_node_result("a", 0, [0, 1], records, RankObservations(launcher_exit_code=1, log_tail=CRASHED))
    assert (found.ending, found.message) == ("failed", told)
    assert [r.kind for r in found.ranks] == [peer or "killed", "crashed"]


def test_storage_that_failed_explains_the_broken_collectives() -> None:
    kinds: tuple[FailureKind, ...] = ("communication", "storage")
    records = {r: failed_record(r, kind, ErrorInfo(type="E", message=kind)) for r, kind in enumerate(kinds)}
    assert build_node_result("a", 0, [0, 1], records).kind == "storage"


def test_what_a_rank_says_of_its_end_reaches_the_node() -> None:
    first = RankResult(rank=0, ending="stopped", budget_spent=True, reason="too dear")
    second = RankResult(rank=1, ending="stopped", budget_spent=True)
    found = build_node_result("a", 0, [0, 1], {0: first, 1: second})
    assert (found.ending, found.reason, found.budget_spent) == ("stopped", "too dear", True)
    assert not build_node_result("a", 0, [0], {0: RankResult(ending="completed")}).budget_spent


WARNING = "W1125 02:00:00 torch/distributed/run.py:851] Setting OMP_NUM_THREADS environment variable\n"


@pytest.mark.parametrize("launcher", [-9, -11])
def test_a_killed_torchrun_is_named_by_its_signal_and_not_by_its_last_words(launcher: int) -> None:
    result = build_node_result("a", 0, [0, 1], {}, RankObservations(launcher_exit_code=launcher, log_tail=WARNING))
    assert result.kind == "launcher"
    assert result.message == f"torchrun on a was killed by {'SIGKILL' if launcher == -9 else 'SIGSEGV'}"


def test_a_torchrun_that_the_agent_ended_is_no_cause() -> None:
    assert build_node_result("a", 0, [0], {}, RankObservations(log_tail=WARNING)).kind == "killed"


def test_a_rank_that_failed_counts_more_than_a_killed_torchrun() -> None:
    failed = failed_record(0, "user_error", ErrorInfo(type="E", message="said"))
    assert (
        build_node_result("a", 0, [0, 1], {0: failed}, RankObservations(launcher_exit_code=-9)).message
        == "rank 0 on a: E: said"
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


def test_exit_codes_of_ranks_without_a_record_are_told_apart() -> None:
    broken = failed_record(0, "communication", ErrorInfo(type="E", message="closed"))
    one = build_node_result(
        "a", 0, [0, 1], {0: broken}, RankObservations(launcher_exit_code=1, log_tail=TABLE.format(1))
    )
    assert one.kind == "exited"
    assert (
        one.message is not None
        and "rank 1 on a: no result: ended with exit code 1 without a Python error" in one.message
    )
    # Rank 0 is not in torchrun's table, so it had exited with 0.
    zero = build_node_result("a", 0, [0, 1], {}, RankObservations(launcher_exit_code=1, log_tail=TABLE.format(-9)))
    assert zero.kind == "user_error"
    assert zero.message is not None and "rank 0 on a: no result: ended with exit code 0 before" in zero.message
    assert build_node_result("a", 0, [0], {}, RankObservations(launcher_exit_code=0)).kind == "user_error"


def completed(rank: int, finished: bool) -> RankResult:
    return RankResult(rank=rank, ending="completed", finished=finished, step=7, committed_step=7)


@pytest.mark.parametrize(
    ("finished", "stop_asked", "ending"),
    [
        (True, False, "completed"),
        (True, True, "completed"),
        (False, False, "completed"),
        (False, True, "stopped"),
    ],
)
def test_after_a_request_to_stop_only_a_session_says_that_a_script_is_done(
    finished: bool, stop_asked: bool, ending: str
) -> None:
    records = {r: completed(r, finished) for r in (0, 1)}
    found = build_node_result(
        "a", 0, [0, 1], records, RankObservations(launcher_exit_code=0, stop_requested=stop_asked)
    )
    assert (found.ending, found.step, found.kind) == (ending, 7, None)
    assert (found.reason is not None) is (ending == "stopped")


@pytest.mark.parametrize(
    ("seen", "ending"),
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
)
def test_an_exit_of_0_without_a_record_counts_as_what_the_session_said(seen: RankObservations, ending: str) -> None:
    assert build_node_result("a", 0, [0], {}, seen).ending == ending


def test_a_rank_that_hung_at_its_end_is_complete_where_all_its_steps_were_done() -> None:
    found = build_node_result(
        "a",
        0,
        [0, 1],
        {0: completed(0, True)},
        RankObservations(finished_records={1: completed(1, True)}, hung_ranks=frozenset({1})),
    )
    assert found.ending == "completed"
    assert found.reason == "all steps were done; rank 1 was idle after all others had completed, and was ended"
    plain = build_node_result("a", 0, [0, 1], {0: completed(0, False)}, RankObservations(hung_ranks=frozenset({1})))
    assert (plain.ending, plain.kind) == ("failed", "hang")
    assert plain.message == "rank 1 was idle after all others had completed, and was ended (a)"


def timed_out(rank: int) -> RankResult:
    error = ErrorInfo(type="RuntimeError", message="[gloo] Timed out waiting 3000ms for recv operation")
    return RankResult(rank=rank, ending="failed", kind="hang", error=error, step=16)


def at(step: int) -> Heartbeat:
    return Heartbeat(step=step, phase=TRAIN)


@pytest.mark.parametrize(
    ("seen", "words"),
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
)
def test_a_hang_is_named_after_the_rank_that_did_not_come(seen: RankObservations, words: str) -> None:
    found = build_node_result("a", 0, range(4), {r: timed_out(r) for r in (0, 2, 3)}, seen)
    assert found.kind == "hang"
    assert found.message is not None and words in found.message


def test_a_hang_of_which_nothing_is_known_blames_nobody() -> None:
    found = build_node_result(
        "a", 0, range(4), {0: timed_out(0)}, RankObservations(heartbeats={r: at(16) for r in range(4)})
    )
    assert found.message == (
        "rank 0 waited in a collective until it timed out, at step 17; ranks 1, 2 and 3 left no record; it is unknown "
        "which rank did not reach it"
    )
    all_waited = build_node_result("a", 0, [0, 1], {r: timed_out(r) for r in (0, 1)})
    assert all_waited.message is not None and "it is unknown which rank did not reach it" in all_waited.message

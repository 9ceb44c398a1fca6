"""The verdict on a node."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.agent.results import judge

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
        (RANKS_DIED, "killed", "killed before it could say why"),
        ("=====\n", "killed", "killed before it could say why"),
        ("", "killed", "killed before it could say why"),
        (None, "killed", "killed before it could say why"),
    ],
)
def test_a_torchrun_that_failed_by_itself_is_told_by_its_log(tail: str | None, kind: str, words: str) -> None:
    result = judge("a", 0, [0, 1], {}, log_tail=tail)
    assert (result.ending, result.kind, result.exit_code) == ("failed", kind, 1)
    assert result.message is not None and words in result.message
    assert ("see logs/agent-a.log" in result.message) is (kind != "killed")


def test_a_rank_that_left_a_record_counts_more_than_the_log() -> None:
    error = {"type": "ValueError", "message": "no"}
    records: dict[int, dict[str, Any]] = {0: {"rank": 0, "ending": "failed", "kind": "user_error", "error": error}}
    result = judge("a", 0, [0, 1], records, log_tail=PORT_TAKEN)
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
    peer: str | None, told: str
) -> None:
    error = {"type": "E", "message": "said"}
    records = {0: {"rank": 0, "ending": "failed", "kind": peer, "error": error}} if peer is not None else {}
    found = judge("a", 0, [0, 1], records, log_tail=CRASHED)
    assert (found.ending, found.message) == ("failed", told)
    assert [r["kind"] for r in found.ranks] == [peer or "killed", "crashed"]


def test_storage_that_failed_explains_the_broken_collectives() -> None:
    records = {
        r: {"rank": r, "ending": "failed", "kind": kind, "error": {"type": "E", "message": kind}}
        for r, kind in enumerate(("communication", "storage"))
    }
    assert judge("a", 0, [0, 1], records).kind == "storage"


def test_what_a_rank_says_of_its_end_reaches_the_node() -> None:
    stopped = {"ending": "stopped", "spent": True}
    records = {0: {"rank": 0, "why": "too dear", **stopped}, 1: {"rank": 1, "why": None, **stopped}}
    found = judge("a", 0, [0, 1], records)
    assert (found.ending, found.why, found.spent) == ("stopped", "too dear", True)
    assert not judge("a", 0, [0], {0: {"rank": 0, "ending": "completed"}}).spent

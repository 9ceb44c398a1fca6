"""Control groups: results at each number of ranks, failures, and the end of the process. The ranks are threads."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist

from clustertrain.checkpoint.core.control_group import GROUP_SIZE, ControlGroup
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.train.core.result import classify_failure
from tests.paths import ROOT

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)


@contextmanager
def connect(size: int, timeout: timedelta = TIMEOUT) -> Iterator[list[ControlGroup]]:
    """Yield the control group of each of ``size`` ranks, all in this process."""
    store = dist.HashStore()
    groups = on_all(range(size), lambda rank: ControlGroup(store, rank, size, timeout))
    with ExitStack() as stack:
        for group in groups:
            stack.callback(group.close)
        yield groups


def on_all(items: Sequence[T], func: Callable[[T], object]) -> list:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(func, items))


def failures(waits: Sequence[Callable[[], bytes]]) -> list[BaseException | None]:
    """Return what each of ``waits`` raised."""

    def failure(wait: Callable[[], bytes]) -> BaseException | None:
        try:
            wait()
        except RuntimeError as e:
            return e
        return None

    return on_all(waits, failure)


@pytest.mark.parametrize("size", [1, 2, 9, *(pytest.param(size, marks=pytest.mark.long) for size in (8, 17, 65))])
def test_all_ranks_get_all_payloads_in_rank_order(size: int) -> None:
    with connect(size) as groups:
        payloads = [f"{group.rank};".encode() for group in groups]
        waits = [group.reduce(payload, b"".join) for group, payload in zip(groups, payloads, strict=True)]
        assert {wait() for wait in waits} == {b"".join(payloads)}
        waits = [group.reduce(payload, b"".join, to_all=False) for group, payload in zip(groups, payloads, strict=True)]
        assert waits[0]() == b"".join(payloads)
        assert set(on_all(groups, lambda group: group.broadcast(payloads[group.rank]))) == {payloads[0]}
        on_all(groups, ControlGroup.barrier)
        peers = [sum(level.size - 1 for level in group._levels) for group in groups]
        assert max(peers) <= (GROUP_SIZE - 1) * math.ceil(math.log(size, GROUP_SIZE))
        assert statistics.median(peers) <= GROUP_SIZE - 1


@pytest.mark.parametrize("size", [0, 504, 505, 5 << 20])
def test_payloads_of_every_size_arrive(size: int) -> None:
    with connect(2) as groups:
        payload = os.urandom(size)
        assert on_all(groups, lambda group: group.broadcast(payload if group.rank == 0 else b"")) == [payload] * 2
        waits = [group.reduce(payload[group.rank :], b"".join, to_all=False) for group in groups]
        assert waits[0]() == payload + payload[1:]


@pytest.mark.long
def test_operations_in_flight_keep_their_order() -> None:
    with connect(9) as groups:
        waits = [[group.reduce(bytes([n]), b"".join) for n in range(50)] for group in groups]
        for of_rank in waits:
            assert [wait() for wait in reversed(of_rank)] == [bytes([n]) * 9 for n in reversed(range(50))]


def test_empty_payloads_are_gathered() -> None:
    with connect(2) as groups:
        assert on_all([Ranks(group) for group in groups], lambda ranks: ranks.all_gather_bytes(b"")) == [[b""] * 2] * 2


# With 17 ranks: the root, a leaf below it, a leader and its leaf, and a rank without a group of leaves.
@pytest.mark.parametrize("gone", [0, 5, 8, 11, 16])
def test_disconnected_rank_fails_the_operation_on_all_ranks(gone: int) -> None:
    with connect(17) as groups:
        alive = [group for group in groups if group.rank != gone]
        waits = [group.reduce(b"", b"".join) for group in alive]
        groups[gone]._abort()
        errors = failures(waits)
        assert {classify_failure(error) for error in errors if error is not None} == {"communication"}
        assert None not in errors
        # The ranks may be at different operations, so the group stays unusable.
        assert failures([group.reduce(b"", b"".join) for group in alive]) == errors


@pytest.mark.long
def test_absent_rank_is_a_hang_on_the_first_rank_that_notices() -> None:
    with connect(9, timedelta(seconds=1)) as groups:
        waits = [group.reduce(b"", b"".join) for group in groups if group.rank != 3]
        kinds = {classify_failure(error) for error in failures(waits) if error is not None}
        assert "hang" in kinds and kinds <= {"hang", "communication"}


@pytest.mark.long
def test_late_rank_does_not_get_the_result_of_another_operation() -> None:
    with connect(4, timedelta(seconds=1)) as groups:
        in_time = [group for group in groups if group.rank != 2]
        assert None not in failures([group.reduce(b"1", max) for group in in_time])
        later = [group.reduce(b"2", max) for group in in_time]
        assert None not in failures([groups[2].reduce(b"1", max), *later])


def test_failed_combination_fails_all_ranks() -> None:
    def combine(payloads: Sequence[bytes]) -> bytes:
        raise ValueError("payloads of different lengths")

    with connect(9) as groups:
        waits = [group.reduce(b"", combine) for group in groups]
        with pytest.raises(ValueError, match="lengths"):
            waits[0]()
        errors = failures(waits[1:])
    assert {classify_failure(error) for error in errors if error is not None} == {"communication"}
    assert None not in errors


def test_close_waits_for_the_operation_in_flight() -> None:
    with connect(2) as groups:
        wait = groups[1].reduce(b"1", b"".join)
        closing = threading.Thread(target=groups[1].close)
        closing.start()
        groups[0].reduce(b"0", b"".join)
        closing.join()
        assert wait() == b"01"
        with pytest.raises(RuntimeError, match="closed"):
            groups[1].barrier()


def test_signal_handler_runs_during_the_wait() -> None:
    with connect(2) as groups:
        received: list[int] = []

        def on_signal(number: int, frame: object) -> None:
            received.append(number)
            groups[0].reduce(b"0", b"".join)  # ends the wait

        previous = signal.signal(signal.SIGUSR1, on_signal)
        try:
            wait = groups[1].reduce(b"1", b"".join)
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1)).start()
            assert wait() == b"01" and received == [signal.SIGUSR1]
        finally:
            signal.signal(signal.SIGUSR1, previous)


EXIT_SCRIPT = """
import sys, time
from tests.unit.checkpoint.core.test_control_group import connect

context = connect(2)
groups = context.__enter__()
wait = groups[1].reduce(b"", b"".join)

class AtShutdown:
    def __del__(self, levels=groups[0]._levels, sleep=time.sleep):
        levels.clear()  # ends the wait of rank 1 with an error
        sleep(0.5)

at_shutdown = AtShutdown()
sys.exit(7)
"""


@pytest.mark.long
def test_operation_in_flight_does_not_change_the_exit_code() -> None:
    process = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (process.returncode, process.stderr) == (7, "")


def test_fork_while_the_thread_waits() -> None:
    with connect(2) as groups:
        wait = groups[1].reduce(b"1", b"".join)
        if (pid := os.fork()) == 0:
            with suppress(BaseException):
                groups[1]._abort()  # as at the exit of the child, which has no thread
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        groups[0].reduce(b"0", b"".join)
        assert wait() == b"01"

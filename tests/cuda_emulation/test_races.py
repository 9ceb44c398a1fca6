"""The checkers of traces, on traces written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.cuda_emulation.collectives import check_order
from tests.cuda_emulation.races import RaceChecker
from tests.cuda_emulation.trace import Event, Kind, Range

A, B = Range(0x10000, 512), Range(0x20000, 512)


def event(
    kind: Kind, name: str, stream: int = 0, reads: Sequence[Range] = (), writes: Sequence[Range] = (), value: int = 0
) -> Event:
    return Event(kind, name, stream, tuple(reads), tuple(writes), value, "", "")


def kernel(stream: int, *, reads: Sequence[Range] = (), writes: Sequence[Range] = ()) -> Event:
    return event("kernel", f"kernel on {stream}", stream, reads, writes)


def record(stream: int, number: int) -> Event:
    return event("stream", "record_event", stream, value=number)


def wait(stream: int, number: int) -> Event:
    return event("stream", "wait_event", stream, value=number)


def allocate(stream: int, block: Range) -> Event:
    return event("memory", "allocate", stream, writes=[block])


def free(stream: int, block: Range) -> Event:
    return event("memory", "free", stream, writes=[block])


RACES = {
    "write and read": [kernel(0, writes=[A]), kernel(1, reads=[A])],
    "read and write": [kernel(0, reads=[A]), kernel(1, writes=[A])],
    "two writes": [kernel(0, writes=[A]), kernel(1, writes=[A])],
    "part of the bytes": [kernel(0, writes=[A]), kernel(1, reads=[Range(A.begin + 256, 8)])],
    "event recorded too early": [record(0, 1), kernel(0, writes=[A]), wait(1, 1), kernel(1, reads=[A])],
    "another stream waits": [kernel(0, writes=[A]), record(0, 1), wait(2, 1), kernel(1, reads=[A])],
    "host waits for another stream": [
        kernel(0, writes=[A]), event("stream", "synchronize_stream", 1), kernel(1, reads=[A])
    ],
    "freed without record_stream": [
        allocate(0, A), kernel(0, writes=[A]), record(0, 1), wait(1, 1), kernel(1, reads=[A]), free(0, A),
        allocate(0, B), kernel(0, writes=[B]),
    ],
    "pinned memory unregistered during a copy": [
        kernel(1, reads=[A], writes=[B]), event("memory", "unregister", writes=[A])
    ],
}  # fmt: skip
NO_RACES = {
    "same stream": [kernel(0, writes=[A]), kernel(0, reads=[A])],
    "two reads": [kernel(0, reads=[A]), kernel(1, reads=[A])],
    "other bytes": [kernel(0, writes=[A]), kernel(1, writes=[B])],
    "event": [kernel(0, writes=[A]), record(0, 1), wait(1, 1), kernel(1, reads=[A])],
    "two events": [
        kernel(0, writes=[A]), record(0, 1), wait(2, 1), record(2, 2), wait(1, 2), kernel(1, reads=[A])
    ],
    "host waited": [kernel(0, writes=[A]), event("stream", "synchronize_stream", 0), kernel(1, reads=[A])],
    "host waited for event": [
        kernel(0, writes=[A]), record(0, 1), event("stream", "synchronize_event", value=1), kernel(1, writes=[A])
    ],
    "device synchronized": [kernel(0, writes=[A]), event("stream", "synchronize_device"), kernel(1, writes=[A])],
    "record_stream": [
        allocate(0, A), kernel(0, writes=[A]), record(0, 1), wait(1, 1), kernel(1, reads=[A]),
        event("stream", "record_stream", 1, writes=[A]), free(0, A), allocate(0, B), kernel(0, writes=[B]),
    ],
    "ordered before the free": [
        allocate(0, A), kernel(1, reads=[A]), record(1, 1), wait(0, 1), free(0, A), allocate(0, B),
        kernel(0, writes=[B]),
    ],
    "ordered before the memory is used again": [
        allocate(0, A), kernel(1, reads=[A]), free(0, A), record(1, 1), wait(0, 1), allocate(0, B),
        kernel(0, writes=[B]),
    ],
    "same address for another tensor": [
        allocate(0, A), kernel(0, writes=[A]), free(0, A), allocate(1, A), kernel(1, writes=[A])
    ],
    "address of former host memory": [kernel(1, reads=[A]), allocate(0, A), kernel(0, writes=[A])],
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_race_is_found(name: str) -> None:
    assert len(RaceChecker().check(RACES[name])) == 1


@pytest.mark.parametrize("name", NO_RACES)
def test_ordered_accesses_are_no_race(name: str) -> None:
    assert RaceChecker().check(NO_RACES[name]) == []


def collective(group: str, name: str, peer: int = -1) -> Event:
    return event("collective", f"{group}|{name}|Floatx4 ", value=peer)


GROUPS = {"all": (0, 1, 2), "pair": (0, 1)}
FIRST = [collective("all", "all_reduce"), collective("pair", "all_gather"), collective("all", "broadcast")]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param([FIRST[1], FIRST[0], FIRST[2]], id="other order of groups"),
        pytest.param(FIRST[:2], id="one missing"),
        pytest.param([*FIRST, FIRST[0]], id="one more"),
        pytest.param([collective("all", "broadcast"), *FIRST[1:]], id="another operation"),
    ],
)
def test_wrong_order_of_collectives_is_found(second: list[Event]) -> None:
    third = [FIRST[0], FIRST[2]]
    found = check_order({0: FIRST, 1: second, 2: third}, GROUPS)
    assert (0, 1) in {mismatch.ranks for mismatch in found}


def test_groups_and_transfers_of_others_are_ignored() -> None:
    second = [FIRST[0], collective("all", "send", peer=2), FIRST[1], FIRST[2]]
    third = [FIRST[0], collective("all", "recv", peer=1), FIRST[2]]
    assert check_order({0: FIRST, 1: second, 2: third}, GROUPS) == []


def transfers(*names: str) -> list[Event]:
    """Return one batch for each text like ``send recv``, and single transfers for ``single send``, with rank 1 or 0."""
    events: list[Event] = []
    for name in names:
        if name == "all_reduce":
            events.append(collective("pair", name))
        elif name.startswith("single "):
            events.append(collective("pair", name.removeprefix("single "), peer=0))
        else:
            events += [collective("pair", f"batched {direction}", peer=0) for direction in name.split()]
            events.append(collective("pair", "end of batch"))
    return events


def to_peer(events: Sequence[Event], peer: int) -> list[Event]:
    return [e._replace(value=peer) if e.value >= 0 else e for e in events]


MATCHING = {
    "batches": (["send recv", "all_reduce"], ["recv send", "all_reduce"]),
    "another order in a batch": (["send recv"], ["send recv"]),
    "a batch against two": (["send send"], ["recv", "recv"]),
    "single transfers in turn": (["single send", "single recv"], ["single recv", "single send"]),
    "a single transfer beside a batch": (["single send", "send"], ["recv", "single recv"]),
}
STUCK = {
    "both send first": (["single send", "single recv"], ["single send", "single recv"]),
    "both send in batches first": (["send", "recv"], ["send", "recv"]),
    "across a collective": (["send", "all_reduce"], ["all_reduce", "recv"]),
    "a batch against a single transfer": (["send"], ["single recv"]),
    "nobody receives": (["send"], []),
}


@pytest.mark.parametrize("name", [*MATCHING, *STUCK])
def test_transfers_run_or_are_found(name: str) -> None:
    ours, theirs = {**MATCHING, **STUCK}[name]
    traces = {0: to_peer(transfers(*ours), 1), 1: to_peer(transfers(*theirs), 0)}
    assert len(check_order(traces, GROUPS)) == (name in STUCK)


def test_transfer_of_another_size_is_found() -> None:
    sent, received = to_peer(transfers("send"), 1), to_peer(transfers("recv"), 0)
    received[0] = received[0]._replace(name="pair|batched recv|Floatx8 ")
    assert len(check_order({0: sent, 1: received}, GROUPS)) == 1

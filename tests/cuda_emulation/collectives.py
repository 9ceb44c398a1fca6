"""The order of collectives and transfers in the traces of all ranks.

NCCL matches collectives of a group by their order, and those of groups that share ranks can block each other, so every
two ranks must start the collectives that they share in the same order.

A transfer ends when its peer takes part in it. Those of one ``batch_isend_irecv`` run together, in the group's stream,
in turn with its collectives. Any other transfer runs by itself, in a stream of the two ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.cuda_emulation.trace import Event

BATCHED, END_OF_BATCH = "batched ", "end of batch"
_Unit = list[Event]
"""A collective, or transfers that run together, in the order of their start."""


@dataclass(frozen=True)
class Mismatch:
    """The first collectives or transfers of two ranks that do not match; None: the rank has no more."""

    ranks: tuple[int, int]
    first: Event | None
    second: Event | None

    def __str__(self) -> str:
        sides = (f"{e.name} ({e.place})" if e else "none" for e in (self.first, self.second))
        return f"ranks {self.ranks[0]} and {self.ranks[1]} differ: {' against '.join(sides)}"


def check_order(traces: Mapping[int, Sequence[Event]], groups: Mapping[str, Sequence[int]]) -> list[Mismatch]:
    """Return where two ranks start collectives or transfers in orders in which they may wait for each other forever.

    Args:
        traces: the events of each rank.
        groups: the ranks of each group by its name, in the order of their numbers in the group.
    """
    mismatches = []
    for a, b in itertools.combinations(sorted(traces), 2):
        shared = {name: ranks for name, ranks in groups.items() if a in ranks and b in ranks}
        mismatch = _compare_collectives(traces, (a, b), shared) or _run_transfers(traces, (a, b), shared)
        if mismatch is not None:
            mismatches.append(mismatch)
    return mismatches


def _compare_collectives(
    traces: Mapping[int, Sequence[Event]], pair: tuple[int, int], shared: Mapping[str, Sequence[int]]
) -> Mismatch | None:
    sides = [[e for e in traces[rank] if _is_collective(e) and _split(e)[0] in shared] for rank in pair]
    for first, second in itertools.zip_longest(*sides):
        if first is None or second is None or _signature(first) != _signature(second):
            return Mismatch(pair, first, second)
    return None


def _run_transfers(
    traces: Mapping[int, Sequence[Event]], pair: tuple[int, int], shared: Mapping[str, Sequence[int]]
) -> Mismatch | None:
    """Run each group's collectives, and the transfers between the two ranks, until the ranks are stuck."""
    for name, ranks in shared.items():
        streams = [
            _streams([e for e in traces[rank] if e.kind == "collective" and _split(e)[0] == name], ranks.index(peer))
            for rank, peer in (pair, pair[::-1])
        ]
        for ours, theirs in zip(*streams, strict=True):
            stuck = _run(ours, theirs)
            if stuck is not None:
                return Mismatch(pair, *stuck)
    return None


def _streams(events: Sequence[Event], peer: int) -> tuple[list[_Unit], list[_Unit]]:
    """Return a group's collectives and batches of transfers with ``peer``, and the other transfers with it."""
    group: list[_Unit] = []
    alone: list[_Unit] = []
    batch: _Unit = []
    for event in events:
        if _is_collective(event):
            group.append([event])
        elif event.value == peer and _split(event)[1].startswith(BATCHED):
            batch.append(event)
        elif event.value == peer:
            alone.append([event])
        elif event.value < 0 and batch:
            group.append(batch)
            batch = []
    return group, alone


def _run(ours: list[_Unit], theirs: list[_Unit]) -> tuple[Event | None, Event | None] | None:
    """Run two ranks' units; return the events at which they are stuck, or None once all have run."""
    while ours or theirs:
        first, second = (side[0] if side else [] for side in (ours, theirs))
        if not _match(first, second):
            return first[0] if first else None, second[0] if second else None
        for side in (ours, theirs):
            if side and not side[0]:
                side.pop(0)
    return None


def _match(ours: _Unit, theirs: _Unit) -> bool:
    """Remove a collective of both sides, or the first transfer in each direction; return whether there was one."""
    for first, second in (("send", "recv"), ("recv", "send"), (None, None)):
        a, b = _first(ours, first), _first(theirs, second)
        if a is not None and b is not None and _signature(a) == _signature(b):
            ours.remove(a)
            theirs.remove(b)
            return True
    return False


def _first(unit: _Unit, transfer: str | None) -> Event | None:
    """Return the first ``send`` or ``recv``; with None, the collective."""
    return next((e for e in unit if (_direction(e) if e.value >= 0 else None) == transfer), None)


def _split(event: Event) -> tuple[str, str, str]:
    group, operation, tensors = event.name.split("|")
    return group, operation, tensors


def _direction(event: Event) -> str:
    return _split(event)[1].removeprefix(BATCHED)


def _signature(event: Event) -> tuple[str, str, str]:
    """Return group, operation and tensors, which must be equal on both sides.

    The sizes of an all-to-all may differ by rank, and the two sides of a transfer have different operations.
    """
    group, operation, tensors = _split(event)
    if event.value >= 0:
        return group, "transfer", tensors
    return group, operation, "" if operation == "all_to_all_single" else tensors


def _is_collective(event: Event) -> bool:
    return event.kind == "collective" and event.value < 0 and _split(event)[1] != END_OF_BATCH

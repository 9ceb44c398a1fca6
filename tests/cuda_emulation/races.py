"""Races between CUDA streams in a trace: a happens-before check with vector clocks.

CUDA runs the kernels of a stream in order, and those of two streams in any order that no event forbids. Every access to
memory is compared with the earlier ones to the same bytes: if one of the two writes, an event or a wait of the host
must order them. The caching allocator gives freed memory to the next tensor of the stream that allocated it. So the
first kernel that uses a new tensor must come after all uses of what that stream freed before, by whichever stream,
except those that ``record_stream`` announced.

``torch.cuda._sanitizer`` checks accesses by the first address of a tensor; here, byte ranges overlap, and frees count.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.cuda_emulation.trace import Event, Range

HOST = -1
"""The host's place among the streams' clocks: what it has waited for is done, and every later kernel comes after it."""
Clock = dict[int, int]
_PAGE_BITS = 16


@dataclass(frozen=True)
class Access:
    """An access to memory by the ``time``-th kernel of ``stream``."""

    range: Range
    stream: int
    time: int
    is_write: bool
    event: Event


@dataclass(frozen=True)
class _Use:
    """An access to memory that was then freed."""

    access: Access
    free: Event

    def is_done(self, clock: Clock) -> bool:
        return _is_done(self.access, clock)


@dataclass
class _Block:
    """Allocated memory, and the uses of what its stream had freed before."""

    range: Range
    earlier_uses: list[_Use]


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders."""

    first: Event
    second: Event
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.reason}: {self.first.name} on stream {self.first.stream} ({self.first.place}, {self.first.caller}) "
            f"and {self.second.name} on stream {self.second.stream} ({self.second.place}, {self.second.caller})"
        )


@dataclass
class RaceChecker:
    """Checker of the events of one device, in the order in which the host made them."""

    races: list[Race] = field(default_factory=list)
    _clocks: defaultdict[int, Clock] = field(default_factory=lambda: defaultdict(dict))
    _event_clocks: dict[int, Clock] = field(default_factory=dict)
    # The accesses that a later one must be ordered after, by the 64 KiB pages of memory.
    _accesses: defaultdict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _blocks: dict[int, _Block] = field(default_factory=dict)  # by address
    _begins: list[int] = field(default_factory=list)  # of the blocks, sorted
    _freed: defaultdict[int, list[_Use]] = field(default_factory=lambda: defaultdict(list))  # by owner
    _recorded: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def check(self, events: Iterable[Event]) -> list[Race]:
        """Return the races of ``events``."""
        for event in events:
            if event.kind == "kernel":
                self._run_kernel(event)
            elif event.kind == "stream":
                self._order(event)
            elif event.kind == "memory":
                self._change_memory(event)
        return self.races

    def _order(self, event: Event) -> None:
        """Apply an event that orders streams."""
        clock = self._clocks[event.stream]
        if event.name == "record_event":
            self._event_clocks[event.value] = self._now(event.stream)
        elif event.name == "wait_event":
            _merge(clock, self._event_clocks.get(event.value, {}))
        elif event.name == "synchronize_event":
            _merge(self._clocks[HOST], self._event_clocks.get(event.value, {}))
        elif event.name == "synchronize_stream":
            _merge(self._clocks[HOST], self._now(event.stream))
        elif event.name == "synchronize_device":
            for stream in list(self._clocks):
                _merge(self._clocks[HOST], self._now(stream))
        elif event.name == "record_stream":
            self._recorded[event.writes[0].begin].add(event.stream)

    def _now(self, stream: int) -> Clock:
        """Return what is done when the last kernel of ``stream`` is."""
        return {**self._clocks[HOST], **_merged(self._clocks[stream], self._clocks[HOST])}

    def _run_kernel(self, event: Event) -> None:
        clock = self._clocks[event.stream]
        _merge(clock, self._clocks[HOST])
        clock[event.stream] = clock.get(event.stream, 0) + 1
        for is_write, ranges in ((False, event.reads), (True, event.writes)):
            for range_ in ranges:
                access = Access(range_, event.stream, clock[event.stream], is_write, event)
                self._enter_block(access, clock)
                self._access(access, clock)

    def _access(self, access: Access, clock: Clock) -> None:
        for earlier in self._overlapping(access.range):
            if (access.is_write or earlier.is_write) and not _is_done(earlier, clock):
                kind = "write" if access.is_write and earlier.is_write else "read and write"
                self.races.append(Race(earlier.event, access.event, f"unordered {kind}"))
        for page in _pages(access.range):
            # An access that is over is implied by the new one if the new one covers it.
            self._accesses[page] = [
                a for a in self._accesses[page]
                if not (_is_done(a, clock) and _covers(access.range, a.range) and (access.is_write or not a.is_write))
            ] + [access]  # fmt: skip

    def _overlapping(self, range_: Range) -> Iterator[Access]:
        seen: set[int] = set()
        for page in _pages(range_):
            for access in self._accesses.get(page, ()):
                if id(access) not in seen and access.range.begin < range_.end and range_.begin < access.range.end:
                    seen.add(id(access))
                    yield access

    def _change_memory(self, event: Event) -> None:
        range_ = event.writes[0]
        if event.name == "allocate":
            now = self._now(event.stream)
            uses = self._freed[event.stream] = [use for use in self._freed[event.stream] if not use.is_done(now)]
            bisect.insort(self._begins, range_.begin)
            self._blocks[range_.begin] = _Block(range_, list(uses))
        elif event.name == "free":
            self._free(event)
        elif (
            event.name != "reuse"
        ):  # memory that the program pinned itself may go only when the host has waited for its copies
            self._report(_Use(a, event) for a in self._overlapping(range_) if not _is_done(a, self._clocks[HOST]))
        # Before an allocation, the bytes may have been host memory, whose end is not reported.
        for page in _pages(range_):
            self._accesses[page] = [a for a in self._accesses[page] if not _covers(range_, a.range)]

    def _free(self, event: Event) -> None:
        range_ = event.writes[0]
        block = self._blocks.pop(range_.begin, None)
        if block is not None:  # otherwise it was allocated before the trace
            del self._begins[bisect.bisect_left(self._begins, range_.begin)]
        owner = event.stream
        recorded = {owner} | self._recorded.pop(range_.begin, set())
        now = self._now(owner)
        uses = [_Use(a, event) for a in self._overlapping(range_) if a.stream not in recorded]
        self._freed[owner] += [use for use in uses if not use.is_done(now)]

    def _enter_block(self, access: Access, clock: Clock) -> None:
        """Check the first access to a block against the uses of memory that the block may have got."""
        index = bisect.bisect_right(self._begins, access.range.begin) - 1
        block = self._blocks[self._begins[index]] if index >= 0 else None
        if block is not None and access.range.begin < block.range.end and block.earlier_uses:
            self._report(use for use in block.earlier_uses if not use.is_done(clock))
            block.earlier_uses = []

    def _report(self, uses: Iterable[_Use]) -> None:
        self.races += [Race(use.access.event, use.free, "memory freed while in use") for use in uses]


def _pages(range_: Range) -> range:
    return range(range_.begin >> _PAGE_BITS, (max(range_.begin, range_.end - 1) >> _PAGE_BITS) + 1)


def _covers(outer: Range, inner: Range) -> bool:
    return outer.begin <= inner.begin and inner.end <= outer.end


def _is_done(access: Access, clock: Clock) -> bool:
    return clock.get(access.stream, 0) >= access.time


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _merged(first: Clock, second: Clock) -> Clock:
    result = dict(first)
    _merge(result, second)
    return result

"""Duration of this rank's forward passes, measured without making the host wait for the device.

A pass without collectives shows the speed of this rank alone. A whole step takes the same time on all ranks, since they
wait for each other in the backward pass.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain import clock
from clustertrain.plan.layout import Layout

MAX_EVENT_PAIRS = 64  # the host may run ahead of a GPU by some steps with many micro-batches

_EventPair = tuple[torch.cuda.Event, torch.cuda.Event]


class _TimedPass(NamedTuple):
    events: _EventPair
    num_passes: int
    """Passes that this measurement represents."""


def is_collective_free(model: nn.Module, layout: Layout) -> bool:
    """Return whether the forward pass has no collectives."""
    if layout.is_fully_sharded or max(layout.tp, layout.pp, layout.cp) > 1:
        return False
    # DDP broadcasts the buffers of rank 0 before each pass.
    return not (isinstance(model, DistributedDataParallel) and any(True for _ in model.buffers()))


class ForwardTimer:
    """Timer of one rank's forward passes that never waits for the device.

    On a GPU, events are read after they have completed. A pass without a free pair of events is assumed to take as long
    as the next timed one, and is counted with it.
    """

    def __init__(self, device: torch.device, is_enabled: bool) -> None:
        self._device = device
        self._is_enabled = is_enabled
        self._sum_s = 0.0
        self._started = 0.0
        self._untimed_passes = 0  # since the last timed pass
        self._in_flight: deque[_TimedPass] = deque()
        self._free_pairs: list[_EventPair] = []
        if is_enabled and device.type == "cuda":
            self._free_pairs = [(_timing_event(), _timing_event()) for _ in range(MAX_EVENT_PAIRS)]
        self._current: _TimedPass | None = None

    def begin(self) -> None:
        if not self._is_enabled:
            return
        if self._device.type != "cuda":
            self._started = clock.monotonic()
            return
        if not self._free_pairs:
            self._collect_finished()
        if not self._free_pairs:
            self._untimed_passes += 1
            return
        self._current = _TimedPass(self._free_pairs.pop(), 1 + self._untimed_passes)
        self._untimed_passes = 0
        self._current.events[0].record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        if not self._is_enabled:
            return
        if self._device.type != "cuda":
            self._sum_s += clock.monotonic() - self._started
        elif self._current is not None:
            self._current.events[1].record(torch.cuda.current_stream(self._device))
            self._in_flight.append(self._current)
            self._current = None

    def sum_s(self) -> float:
        """Return the total seconds of all passes known to have finished; NaN if disabled."""
        if not self._is_enabled:
            return math.nan
        self._collect_finished()
        return self._sum_s

    def _collect_finished(self) -> None:
        while self._in_flight and self._in_flight[0].events[1].query():  # type: ignore[no-untyped-call]
            finished = self._in_flight.popleft()
            self._sum_s += finished.num_passes * finished.events[0].elapsed_time(finished.events[1]) / 1000
            self._free_pairs.append(finished.events)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

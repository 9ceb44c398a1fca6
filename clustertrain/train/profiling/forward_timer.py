"""How long the forward passes of this rank take, without making the host wait for the device.

A pass that waits for no other rank tells how fast this one is by itself: the sum of a step is the same on all ranks,
since they wait for each other in the backward pass.
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

IN_FLIGHT = 64  # pairs of events: the host runs ahead of a GPU by some steps of many micro-batches

_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class _Timed(NamedTuple):
    pair: _Pair
    passes: int  # that it stands for


def waits_for_nobody(model: nn.Module, layout: Layout) -> bool:
    """Whether the forward pass has no collective in it."""
    if layout.fully_sharded or max(layout.tp, layout.pp, layout.cp) > 1:
        return False
    # DDP sends the buffers of its first rank to the others before each pass.
    return not (isinstance(model, DistributedDataParallel) and any(True for _ in model.buffers()))


class ForwardTime:
    """A clock for the forward passes of one rank, none of whose methods waits: on a GPU events are read when they have
    passed, and a pass for which none is free is taken to be as long as the next one that is timed, and counted with
    it."""

    def __init__(self, device: torch.device, measured: bool) -> None:
        self._device = device
        self._measured = measured
        self._sum_s = 0.0
        self._started = 0.0
        self._missed = 0  # since the last pass that is timed
        self._under_way: deque[_Timed] = deque()
        self._free: list[_Pair] = []
        if measured and device.type == "cuda":
            self._free = [(_event(), _event()) for _ in range(IN_FLIGHT)]
        self._now: _Timed | None = None

    def begin(self) -> None:
        if not self._measured:
            return
        if self._device.type != "cuda":
            self._started = clock.monotonic()
            return
        if not self._free:
            self._collect()
        if not self._free:
            self._missed += 1
            return
        self._now = _Timed(self._free.pop(), 1 + self._missed)
        self._missed = 0
        self._now.pair[0].record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        if not self._measured:
            return
        if self._device.type != "cuda":
            self._sum_s += clock.monotonic() - self._started
        elif self._now is not None:
            self._now.pair[1].record(torch.cuda.current_stream(self._device))
            self._under_way.append(self._now)
            self._now = None

    def sum_s(self) -> float:
        """Of all passes that have ended, as far as is known now; nan where they are not measured."""
        if not self._measured:
            return math.nan
        self._collect()
        return self._sum_s

    def _collect(self) -> None:
        while self._under_way and self._under_way[0].pair[1].query():  # type: ignore[no-untyped-call]
            timed = self._under_way.popleft()
            self._sum_s += timed.passes * timed.pair[0].elapsed_time(timed.pair[1]) / 1000
            self._free.append(timed.pair)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

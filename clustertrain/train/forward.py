"""How long the forward passes of this rank take, without making the host wait for the device.

A pass that waits for no other rank tells how fast this one is by itself: the sum of a step is the same on all ranks,
since they wait for each other in the backward pass.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain import clock
from clustertrain.plan.layout import Layout

IN_FLIGHT = 64  # pairs of events: the host runs ahead of a GPU by some steps of many micro-batches


def waits_for_nobody(model: nn.Module, layout: Layout) -> bool:
    """Whether the forward pass has no collective in it."""
    if layout.fully_sharded or max(layout.tp, layout.pp, layout.cp) > 1:
        return False
    # DDP sends the buffers of its first rank to the others before each pass.
    return not (isinstance(model, DistributedDataParallel) and any(True for _ in model.buffers()))


class ForwardTime:
    """A clock for the forward passes of one rank, none of whose methods waits: on a GPU events are read when they have
    passed, and passes for which none is free are taken to be as long as the others."""

    def __init__(self, device: torch.device, measured: bool) -> None:
        self._device = device
        self._measured = measured
        self._sum_s = 0.0
        self._counted = self._missed = 0
        self._started = 0.0
        self._pair: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if measured and device.type == "cuda":
            self._free = [(_event(), _event()) for _ in range(IN_FLIGHT)]

    def begin(self) -> None:
        if not self._measured:
            return
        if self._device.type != "cuda":
            self._started = clock.monotonic()
        elif self._free:
            self._pair = self._free.pop()
            self._pair[0].record(torch.cuda.current_stream(self._device))
        else:
            self._pair = None
            self._missed += 1

    def end(self) -> None:
        if not self._measured:
            return
        if self._device.type != "cuda":
            self._sum_s += clock.monotonic() - self._started
            self._counted += 1
        elif self._pair is not None:
            self._pair[1].record(torch.cuda.current_stream(self._device))
            self._under_way.append(self._pair)
            self._pair = None

    def sum_s(self) -> float:
        """Of all passes that have ended, as far as is known now; nan where they are not measured."""
        if not self._measured:
            return math.nan
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            pair = self._under_way.popleft()
            self._sum_s += pair[0].elapsed_time(pair[1]) / 1000
            self._counted += 1
            self._free.append(pair)
        return self._sum_s * (1 + self._missed / self._counted) if self._counted else 0.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

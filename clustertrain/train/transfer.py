"""Batches on their way from the host to the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class ToDevice:
    """Copies to a GPU on a stream of its own, so that a batch travels while the step before it computes; the kernels
    that use it wait for it, the host does not. On the CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        self._under_way: deque[_Pair] = deque()
        self._copied_s = 0.0

    def __call__(self, batch: Any) -> Any:
        if self._stream is None:
            return batch
        begin, end = _timer(), _timer()
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            begin.record()
            moved = _moved(batch, self._device, computing)
            end.record()
        computing.wait_event(end)
        self._under_way.append((begin, end))
        return moved

    @property
    def copied_s(self) -> float:
        """Seconds that the copies took that have ended, from the device's clock and without waiting for it."""
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._under_way.popleft()
            self._copied_s += begin.elapsed_time(end) / 1000
        return self._copied_s


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _moved(batch: Any, device: torch.device, computing: torch.cuda.Stream) -> Any:
    if isinstance(batch, torch.Tensor):
        # From memory that is not pinned a copy makes the host wait.
        host = batch if batch.is_pinned() else batch.pin_memory()
        there = host.to(device, non_blocking=True)
        there.record_stream(computing)  # its memory is not given out again before the step has used it
        return there
    if isinstance(batch, dict):
        return {k: _moved(v, device, computing) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(v, device, computing) for v in batch)
    return batch

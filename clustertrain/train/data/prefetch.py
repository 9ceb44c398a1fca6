"""Batches on their way from the host to the device."""

from __future__ import annotations

from typing import Any

import torch


class ToDevice:
    """Copies to a GPU on a stream of its own, so that a batch travels while the step before it computes; the kernels
    that use it wait for it, the host does not. On the CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        if self._stream is None:
            return batch
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = _moved(batch, self._device, computing)
        computing.wait_stream(self._stream)
        return moved


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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

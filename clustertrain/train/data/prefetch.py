"""Transfer of batches from the host to the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


class DeviceTransfer:
    """Copy of batches to a GPU on a separate stream, so that a transfer overlaps with the previous step.

    Kernels that use the batch wait for it; the host does not. On the CPU the batch is returned unchanged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _create_stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        if self._stream is None:
            return batch
        compute_stream = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            on_device = _copy_to_device(batch, self._device, compute_stream)
        compute_stream.wait_stream(self._stream)
        return on_device


def _create_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _copy_to_device(batch: Any, device: torch.device, compute_stream: torch.cuda.Stream) -> Any:
    if isinstance(batch, torch.Tensor):
        # A copy from pageable memory blocks the host.
        pinned = batch if batch.is_pinned() else batch.pin_memory()
        on_device = pinned.to(device, non_blocking=True)
        on_device.record_stream(compute_stream)  # keeps its memory until the step has used it
        return on_device
    # The containers that collating and pinning keep: torch's default_collate and pin_memory.
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, {k: _copy_to_device(v, device, compute_stream) for k, v in batch.items()})
    if isinstance(batch, (list, tuple)):
        values = [_copy_to_device(v, device, compute_stream) for v in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _rebuild_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return ``batch`` with other values; a dict if its type can be neither copied nor built from one."""
    if type(batch) is dict:
        return values
    try:
        if isinstance(batch, MutableMapping):  # it may have attributes beside its items
            clone = copy.copy(batch)
            clone.update(values)
            return clone
        return type(batch)(values)  # type: ignore[call-arg]
    except TypeError:
        return values

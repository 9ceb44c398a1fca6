"""Memory used by this rank."""

from __future__ import annotations

import resource

import torch

_GIB = 1 << 30


def allocated_gib(device: torch.device) -> float:
    """Return the GPU memory in GiB that torch's allocator has allocated now."""
    return torch.cuda.memory_allocated(device) / _GIB


def peak_allocated_gib(device: torch.device) -> float | None:
    """Return the peak of torch's allocator so far, in GiB; None on CPU, which has no such allocator.

    The counters are on the host, so nothing waits for the device. Memory that the allocator reserves, the CUDA context
    and NCCL's buffers are not included.
    """
    return torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else None


def peak_resident_gib() -> float:
    """Return the peak resident host memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # Linux counts in KiB

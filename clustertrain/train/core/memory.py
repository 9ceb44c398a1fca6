"""How much memory this rank has needed."""

from __future__ import annotations

import resource

import torch

_GIB = 1 << 30


def allocated_gib(device: torch.device) -> float:
    """What torch's allocator has given out now, on a GPU."""
    return torch.cuda.memory_allocated(device) / _GIB


def peak_allocated_gib(device: torch.device) -> float | None:
    """The most that torch's allocator had given out so far; None on a CPU, where there is no such allocator.

    The allocator's counters are the host's own: nothing waits for the device. What it keeps in reserve, the CUDA
    context and NCCL's buffers come on top.
    """
    return torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else None


def peak_resident_gib() -> float:
    """The most host memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # Linux counts in KiB

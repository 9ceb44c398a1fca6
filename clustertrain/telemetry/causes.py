"""Why GPUs are not busy: from where on a cause explains it, and what helps. The same for the alert of a running job and
for the notes of its report."""

from __future__ import annotations

from collections.abc import Sequence

LOW = 0.7  # mean utilization
DATA = 0.1  # share of a step that is spent waiting for data
CORES_BUSY = 0.9  # of those that there are

# Bytes/s a GPU from which links are busy: about a tenth of what NVLink 3 and 4, PCIe 4 x16 and a 200 Gbit/s port carry.
NVLINK, PCIE, INFINIBAND = 30e9, 3e9, 2.5e9

FASTER_DATA = "more data-loader workers (data.workers), data on faster or local storage, or prepared beforehand"
MORE_CORES = "more cores with --cpus-per-gpu"
LESS_TRAFFIC = (
    "a larger micro batch or more gradient accumulation, a layout that keeps its traffic inside a node "
    "(`clustertrain plan` says what each costs), and see docs/nccl.md for the network"
)
LARGER_KERNELS = "a larger micro batch, compile = true or CUDA graphs, or fewer GPUs"


def listed(words: Sequence[str], between: str) -> str:
    """``["a", "b", "c"]``, ``or`` -> ``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {between} {words[-1]}"


def links(rates: Sequence[tuple[str, float | None, float]]) -> list[str]:
    """Those of ``(name, bytes/s or None, limit)`` that are busy, in words."""
    return [f"{name} at {rate / 1e9:.1f} GB/s" for name, rate, limit in rates if rate is not None and rate >= limit]

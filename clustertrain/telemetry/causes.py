"""Why GPUs are not busy: from where on a cause explains it, and what helps. The same for the alert of a running job and
for the notes of its report."""

from __future__ import annotations

from collections.abc import Sequence

LOW_UTILIZATION = 0.7  # mean utilization
HIGH_DATA_WAIT = 0.1  # share of a step that is spent waiting for data
HIGH_CPU_UTILIZATION = 0.9  # of those that there are

# Bytes/s a GPU from which links are busy: about a tenth of what NVLink 3 and 4, PCIe 4 x16 and a 200 Gbit/s port carry.
NVLINK_BUSY, PCIE_BUSY, INFINIBAND_BUSY = 30e9, 3e9, 2.5e9

FIX_DATA_LOADING = "more data-loader workers (data.workers), data on faster or local storage, or prepared beforehand"
FIX_CPU_CORES = "more cores with --cpus-per-gpu"
FIX_NETWORK = (
    "a larger micro batch or more gradient accumulation, a layout that keeps its traffic inside a node "
    "(`clustertrain plan` says what each costs), and see docs/explanation/nccl.md for the network"
)
FIX_SMALL_KERNELS = "a larger micro batch, compile = true or CUDA graphs, or fewer GPUs"


def join_words(items: Sequence[str], conjunction: str) -> str:
    """``["a", "b", "c"]``, ``or`` -> ``a, b or c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


def format_busy_links(rates: Sequence[tuple[str, float | None, float]]) -> list[str]:
    """Those of ``(name, bytes/s or None, limit)`` that are busy, in words."""
    return [f"{name} at {rate / 1e9:.1f} GB/s" for name, rate, limit in rates if rate is not None and rate >= limit]

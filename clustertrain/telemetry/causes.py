"""Thresholds and fixes for the causes of low GPU utilization, shared by the alerts of a running job and its report."""

from __future__ import annotations

from collections.abc import Sequence

LOW_UTILIZATION = 0.7  # mean utilization
HIGH_DATA_WAIT = 0.1  # share of the step time spent waiting for data
HIGH_CPU_UTILIZATION = 0.9  # share of the processors

# Links count as busy from these bytes/s per GPU: about a tenth of the capacity of NVLink 3 and 4, PCIe 4 x16 and a
# 200 Gbit/s port.
NVLINK_BUSY, PCIE_BUSY, INFINIBAND_BUSY = 30e9, 3e9, 2.5e9

FIX_DATA_LOADING = "use more data-loader workers (data.workers), faster or local storage, or preprocessed data"
FIX_CPU_CORES = "request more cores with --cpus-per-gpu"
FIX_NETWORK = (
    "use a larger micro batch, more gradient accumulation, or a layout that keeps its traffic inside a node "
    "(`clustertrain plan` shows the cost of each); see docs/explanation/nccl.md for the network"
)
FIX_SMALL_KERNELS = "use a larger micro batch, compile = true or CUDA graphs, or fewer GPUs"


def join_words(items: Sequence[str], conjunction: str) -> str:
    """Join items into a phrase: ``["a", "b", "c"]`` with ``or`` gives ``a, b or c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


def format_busy_links(rates: Sequence[tuple[str, float | None, float]]) -> list[str]:
    """Return a phrase for each link whose rate reaches its limit; each rate is ``(name, bytes/s or None, limit)``."""
    return [f"{name} at {rate / 1e9:.1f} GB/s" for name, rate, limit in rates if rate is not None and rate >= limit]

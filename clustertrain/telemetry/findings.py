"""What alerts of a running job and insights of its report share: severities, limits, wording and fixes.

Each has its own rules, because they see different data (``docs/decisions/0047-alerts-and-insights-stay-two.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.documentation import page_url

CRITICAL, WARNING, INFO = "critical", "warning", "info"
SEVERITY_ORDER = {CRITICAL: 0, WARNING: 1, INFO: 2}

LOW_UTILIZATION = AlertsSpec().utilization  # mean utilization; alerts use the recipe's value
HIGH_DATA_WAIT = 0.1  # share of the step time spent waiting for data
HIGH_CPU_UTILIZATION = 0.9  # share of the processors
HOT_C = 83.0  # lowest maximum operating temperature that nvidia-smi reports for data-center GPUs (V100; A100 has 85)

# Links count as busy from these bytes/s per GPU: about a tenth of the capacity of NVLink 3 and 4, PCIe 4 x16 and a
# 200 Gbit/s port.
_NVLINK_BUSY, _PCIE_BUSY, _INFINIBAND_BUSY = 30e9, 3e9, 2.5e9

FIX_CPU_CORES = "request more cores with --cpus-per-gpu"
FIX_GPU_MEMORY = "use a smaller micro batch, activation checkpointing or more sharding, before a longer batch fails"
FIX_NETWORK = (
    "use a larger micro batch, more gradient accumulation, or a layout that keeps its traffic inside a node "
    f"(`clustertrain plan` shows the cost of each); see {page_url('explanation/nccl')} for the network"
)
_FIX_DATA_LOADING = "use more data-loader workers (data.workers), faster or local storage, or preprocessed data"
_FIX_SMALL_KERNELS = "use a larger micro batch, compile = true or CUDA graphs, or fewer GPUs"

Cause = tuple[str, str]  # evidence and fix


def gpu_label(index: int | None, uuid: str) -> str:
    return f"GPU {uuid if index is None else index}"


def format_busy_links(nvlink: float | None, pcie: float | None, infiniband: float | None) -> str:
    """Return a phrase for the links whose rate, in bytes/s per GPU, is high; empty if none is."""
    rates = (
        ("NVLink", nvlink, _NVLINK_BUSY),
        ("PCIe", pcie, _PCIE_BUSY),
        ("InfiniBand", infiniband, _INFINIBAND_BUSY),
    )
    busy = [f"{name} at {rate / 1e9:.1f} GB/s" for name, rate, limit in rates if rate is not None and rate >= limit]
    return f"{_join_words(busy)} per GPU" if busy else ""


def waiting_for_data(share: float, busy_cores: str) -> Cause:
    """Return the cause of a wait for data during ``share`` of a step; ``busy_cores`` says that the cores are busy."""
    evidence = f"training waits for data during {share:.0%} of a step"
    if not busy_cores:
        return evidence, _FIX_DATA_LOADING
    return f"{evidence}, with {busy_cores}", f"{FIX_CPU_CORES}; otherwise {_FIX_DATA_LOADING}"


def waiting_for_communication(busy_links: str) -> Cause:
    return f"waiting for communication, with {busy_links}", FIX_NETWORK


def unknown_cause(ruled_out: Sequence[str]) -> Cause:
    """Return the cause if no rule names one; ``ruled_out`` are the causes that the data excludes."""
    if not ruled_out:
        return "the recorded data does not show the cause", _FIX_SMALL_KERNELS
    verb = "is" if len(ruled_out) == 1 else "are"
    evidence = f"{_join_words(ruled_out)} {verb} not the cause; kernels may be too small, or Python too slow"
    return evidence, _FIX_SMALL_KERNELS


def _join_words(items: Sequence[str]) -> str:
    """Join items into a phrase: ``["a", "b", "c"]`` gives ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def format_joules(value: float) -> str:
    """Format the energy per token with three digits, such as ``7.9 mJ`` or ``1.23 J``."""
    return f"{value * 1000:.3g} mJ" if abs(value) < 1 else f"{value:.3g} J"

"""Seconds of collectives on a network of two levels: links that join the GPUs of a node, a fabric across nodes.

Rings: an all-gather or a reduce-scatter of S bytes among n ranks moves S (n - 1) / n through each rank's slowest link,
an all-reduce twice that (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.config.hardware import GpuType

# Of the data sheet's bandwidth, at the sizes of training's messages: at 16 GiB A100 and H200 reach 235 of 300 and 368
# of 450 GB/s (stas00/ml-engineering). Set, like the latencies, with the constants of plan/cost/compute.py.
LINK_EFFICIENCY, FABRIC_EFFICIENCY = 0.72, 0.9
PCIE_GB_S = 25.0  # PCIe 4 x16, 31.5 GB/s in one direction, shared among the GPUs of a switch
LAUNCH_S = 70e-6  # of one collective, with the waiting for each other that it begins with
HOP_S = 2.5e-6  # a step of the ring across nodes


@dataclass(frozen=True)
class Network:
    """``island``: how many ranks the fast links join, ``per_node``: how many a node has; ``link`` and ``fabric``:
    bytes/s a rank in one direction."""

    island: int
    link: float
    fabric: float
    per_node: int = 8

    def group(self, size: int, stride: int) -> Group:
        """Ranks that are ``stride`` apart in the order of the ranks."""
        inside = max(1, min(size, self.island // stride))
        if inside >= size:
            return Group(size, 1, self.link)
        return Group(size, -(-size // inside), min(self.link, self.fabric * inside))


@dataclass(frozen=True)
class Group:
    size: int
    nodes: int
    bandwidth: float  # bytes/s through each rank of the ring

    def gather(self, size_bytes: float, calls: float = 1.0) -> float:
        """Seconds of ``calls`` all-gathers, or reduce-scatters, of ``size_bytes`` (the whole) altogether."""
        if self.size == 1:
            return 0.0
        return size_bytes * (self.size - 1) / self.size / self.bandwidth + calls * self.latency

    def reduce(self, size_bytes: float, calls: float = 1.0) -> float:
        """Seconds of ``calls`` all-reduces of ``size_bytes`` altogether."""
        return 2.0 * self.gather(size_bytes, calls)

    @property
    def latency(self) -> float:
        return LAUNCH_S + HOP_S * (self.nodes - 1)


def of(gpu: GpuType, gpus_per_node: int, fabric_gb_s: float = 0.0) -> Network:
    """Of a cluster of ``gpu``; a fabric of 0 is that of the system the type usually comes in."""
    link = gpu.link_gb_s * LINK_EFFICIENCY or PCIE_GB_S
    fabric = (fabric_gb_s or gpu.fabric_gb_s) * FABRIC_EFFICIENCY
    return Network(gpu.domain or gpus_per_node, link * 1e9, fabric * 1e9, gpus_per_node)

"""Time of collectives on a two-level network: links between the GPUs of a node, and a fabric across nodes.

Rings: an all-gather or a reduce-scatter of S bytes among n ranks moves S (n - 1) / n through each rank's slowest link,
an all-reduce twice that (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.config.hardware import GpuType

# Fractions of the data sheet's bandwidth at the message sizes of training: at 16 GiB A100 and H200 reach 235 of 300 and
# 368 of 450 GB/s (stas00/ml-engineering). Fitted, like the latencies, with the constants of plan/cost/compute.py.
LINK_EFFICIENCY, FABRIC_EFFICIENCY = 0.72, 0.9
PCIE_GB_S = 25.0  # PCIe 4 x16, 31.5 GB/s in one direction, shared among the GPUs of a switch
LAUNCH_S = 70e-6  # of one collective, including the initial synchronization
HOP_S = 5e-6  # of each further step of a ring that crosses nodes; inside a node it is negligible


@dataclass(frozen=True)
class Network:
    """Bandwidths between ranks."""

    domain_size: int
    """Ranks joined by the fast links."""
    link_bytes_s: float
    """Bytes/s per rank in one direction."""
    fabric_bytes_s: float
    """Bytes/s per rank in one direction."""
    gpus_per_node: int = 8

    def group(self, size: int, stride: int) -> RingGroup:
        """Return the ring of ``size`` ranks that are ``stride`` apart."""
        ranks_per_domain = max(1, min(size, self.domain_size // stride))
        if ranks_per_domain >= size:
            return RingGroup(size, 1, self.link_bytes_s)
        return RingGroup(
            size, -(-size // ranks_per_domain), min(self.link_bytes_s, self.fabric_bytes_s * ranks_per_domain)
        )


@dataclass(frozen=True)
class RingGroup:
    """Ranks that communicate in a ring."""

    size: int
    nodes: int
    bytes_s: float  # bytes/s through each rank of the ring

    def all_gather_s(self, size_bytes: float, calls: float = 1.0) -> float:
        """Return the seconds of ``calls`` all-gathers or reduce-scatters of ``size_bytes`` (whole tensors) in total."""
        if self.size == 1:
            return 0.0
        return size_bytes * (self.size - 1) / self.size / self.bytes_s + calls * self.latency_s

    def all_reduce_s(self, size_bytes: float, calls: float = 1.0) -> float:
        """Return the seconds of ``calls`` all-reduces of ``size_bytes`` in total."""
        return 2.0 * self.all_gather_s(size_bytes, calls)

    @property
    def latency_s(self) -> float:
        return LAUNCH_S + (HOP_S * (self.size - 1) if self.nodes > 1 else 0.0)


def build_network(gpu: GpuType, gpus_per_node: int, fabric_gb_s: float = 0.0) -> Network:
    """Return the network of a cluster of ``gpu``; a fabric of 0 stands for the type's usual one."""
    link = gpu.link_gb_s * LINK_EFFICIENCY or PCIE_GB_S
    fabric = (fabric_gb_s or gpu.fabric_gb_s) * FABRIC_EFFICIENCY
    return Network(gpu.domain or gpus_per_node, link * 1e9, fabric * 1e9, gpus_per_node)

"""What the ranks run on, for the time model: the catalogue's figures, or a cluster's own where they were measured."""

from __future__ import annotations

from clustertrain.plan import compute, network
from clustertrain.plan.time import Machine
from clustertrain.spec.cluster import ClusterProfile
from clustertrain.spec.hardware import GpuType


def machine_of(gpu: GpuType, gpus_per_node: int, precision: str, profile: ClusterProfile) -> Machine:
    return Machine(network.of(gpu, gpus_per_node), compute.rates(gpu, precision))

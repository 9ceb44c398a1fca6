"""What the ranks run on, for the time model: the catalogue's figures, or a cluster's own where they were measured."""

from __future__ import annotations

from dataclasses import replace

from clustertrain.plan import compute, network
from clustertrain.plan.time import Machine
from clustertrain.spec import hardware
from clustertrain.spec.cluster import ClusterProfile
from clustertrain.spec.hardware import GpuType


def machine_of(gpu: GpuType, gpus_per_node: int, precision: str, profile: ClusterProfile) -> Machine:
    """``precision``: one of the recipe's. A measured matmul rate counts for 16 bit and scales what rests on it."""
    rates, measured = compute.rates(gpu, precision), profile.measured
    if measured is None or hardware.find(measured.device) is not gpu:
        return Machine(network.of(gpu, gpus_per_node), rates)
    found = network.of(gpu, gpus_per_node)
    if measured.node_bus_gb_s:
        found = replace(found, link=measured.node_bus_gb_s * 1e9)
    if measured.fabric_bus_gb_s:
        found = replace(found, fabric=measured.fabric_bus_gb_s * 1e9)
    if measured.gemm_tflops and measured.gemm_dtype != "fp32":
        scale = measured.gemm_tflops * 1e12 * compute.FITTED.sustained[compute.generation(gpu)] / rates.half
        rates = replace(rates, matmul=rates.matmul * scale, half=rates.half * scale)
    return Machine(found, rates)

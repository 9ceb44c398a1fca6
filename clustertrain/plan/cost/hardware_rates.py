"""What the ranks run on, for the time model: the catalogue's figures, or a cluster's own where they were measured."""

from __future__ import annotations

from dataclasses import replace

from clustertrain.config import hardware
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.hardware import GpuType
from clustertrain.plan.cost import collectives, compute
from clustertrain.plan.cost.step_time import Machine

# Training's messages are smaller than those of a bandwidth measurement: 0.72 of an A100's links against 0.78.
MESSAGE_SIZE_FACTOR = 0.92


def find_gpu_type(name: str, profile: ClusterProfile) -> GpuType | None:
    """The type that the user or the profile names, from the profile's own ``[gpu]`` or the catalogue."""
    if profile.gpu is not None and name in ("", profile.gpu.name):
        return profile.gpu
    return hardware.find_gpu_type(name)


def estimate_fabric_gb_s(profile: ClusterProfile, gpus_per_node: int) -> float:
    """GB/s of one GPU across nodes: of the fabric that the profile names, else of the ports that were seen on a node;
    0: neither is there."""
    if profile.fabric:
        return hardware.parse_node_gb_s(profile.fabric) / gpus_per_node
    if profile.node is None:
        return 0.0
    hcas = [port.rate_gbit for port in profile.node.hcas if port.state == "active" and port.rate_gbit]
    ports = hcas + [port.rate_gbit for port in profile.node.efa if port.state == "active" and port.rate_gbit]
    fastest = [rate for rate in ports if rate == max(ports)]  # slower ones are for storage and management
    return sum(fastest if profile.node.efa else fastest[:gpus_per_node], start=0.0) / 8 / gpus_per_node


def build_machine(gpu: GpuType, gpus_per_node: int, precision: str, profile: ClusterProfile) -> Machine:
    """``precision``: one of the recipe's. A measured matmul rate counts for 16 bit and scales what rests on it."""
    rates, network = (
        compute.build_rates(gpu, precision),
        collectives.build_network(gpu, gpus_per_node, estimate_fabric_gb_s(profile, gpus_per_node)),
    )
    measured = profile.measured
    if measured is not None and (profile.gpu is gpu or hardware.find_gpu_type(measured.device) is gpu):
        if measured.node_bus_gb_s:
            network = replace(network, link_bytes_s=measured.node_bus_gb_s * 1e9 * MESSAGE_SIZE_FACTOR)
        if measured.fabric_bus_gb_s:
            network = replace(network, fabric_bytes_s=measured.fabric_bus_gb_s * 1e9 * MESSAGE_SIZE_FACTOR)
        if measured.gemm_tflops and measured.gemm_dtype != "fp32":
            nominal = compute.build_rates(gpu, "bf16").half
            scale = (
                measured.gemm_tflops * 1e12 * compute.FITTED_CONSTANTS.sustained[compute.gpu_generation(gpu)] / nominal
            )
            rates = replace(rates, matmul=rates.matmul * scale, half=rates.half * scale)
    return Machine(network, rates, profile.calibration)

"""Hardware of the time model: the catalogue's figures, or those measured on the cluster."""

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
    """Return the GPU type ``name`` from the profile's ``[gpu]`` or the catalogue; None if unknown."""
    if profile.gpu is not None and name in ("", profile.gpu.name):
        return profile.gpu
    return hardware.find_gpu_type(name)


def estimate_fabric_gb_s(profile: ClusterProfile, gpus_per_node: int) -> float:
    """Return the GB/s of one GPU across nodes, from the profile's fabric or its node's ports; 0 if unknown."""
    if profile.fabric:
        return hardware.parse_node_gb_s(profile.fabric) / gpus_per_node
    if profile.node is None:
        return 0.0
    hcas = [port.rate_gbit for port in profile.node.hcas if port.state == "active" and port.rate_gbit]
    ports = hcas + [port.rate_gbit for port in profile.node.efa if port.state == "active" and port.rate_gbit]
    fastest = [rate for rate in ports if rate == max(ports)]  # slower ports serve storage and management
    return sum(fastest if profile.node.efa else fastest[:gpus_per_node], start=0.0) / 8 / gpus_per_node


def build_machine(gpu: GpuType, gpus_per_node: int, precision: str, profile: ClusterProfile) -> Machine:
    """Return the machine for a recipe's ``precision``; a measured matmul rate, in 16 bit, scales the others."""
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

"""Time of collectives: the links that they use, and how it grows."""

from __future__ import annotations

import pytest

from clustertrain.config import hardware
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.hardware import GpuType
from clustertrain.plan.cost import collectives
from clustertrain.plan.cost.collectives import Network
from clustertrain.plan.cost.hardware_rates import MESSAGE_SIZE_FACTOR, build_machine

LARGE = 1 << 36  # bytes, so many that latency is negligible


def gpu(name: str) -> GpuType:
    gpu_type = hardware.find_gpu_type(name)
    assert gpu_type is not None
    return gpu_type


def network_of(name: str, gpus_per_node: int = 8) -> Network:
    return collectives.build_network(gpu(name), gpus_per_node)


def test_ring_inside_node_uses_its_links() -> None:
    network = network_of("h100")
    for size, stride in ((2, 1), (8, 1), (2, 4), (4, 2)):
        group = network.group(size, stride)
        assert (group.nodes, group.bytes_s) == (1, network.link_bytes_s)


def test_ring_across_nodes_shares_fabric_of_ranks_per_node() -> None:
    network = network_of("h100")
    one, four, eight = network.group(4, 8), network.group(16, 2), network.group(32, 1)  # ranks per node
    assert (one.nodes, one.bytes_s) == (4, network.fabric_bytes_s)
    assert (four.nodes, four.bytes_s) == (4, 4 * network.fabric_bytes_s)
    # With all ranks of a node, its links are the bottleneck.
    assert eight.nodes == 4 and eight.bytes_s == network.link_bytes_s < 8 * network.fabric_bytes_s
    # The same ranks take longer across nodes.
    assert network.group(8, 8).all_gather_s(LARGE) > network.group(8, 1).all_gather_s(LARGE)


def test_gpus_without_links_communicate_over_pcie() -> None:
    assert network_of("l4").group(4, 1).bytes_s == collectives.PCIE_GB_S * 1e9 < network_of("a100").link_bytes_s


def test_nvl72_links_join_nodes() -> None:
    network = network_of("gb200", gpus_per_node=4)
    assert network.group(72, 1).nodes == 1 and network.group(72, 1).bytes_s == network.link_bytes_s
    assert network.group(8, 9).nodes == 1
    assert network.group(144, 1).nodes == 2


def test_all_reduce_costs_reduce_scatter_plus_all_gather() -> None:
    for size, stride in ((8, 1), (64, 1), (4, 8)):
        group = network_of("a100").group(size, stride)
        assert group.all_reduce_s(LARGE, 3) == pytest.approx(2 * group.all_gather_s(LARGE, 3))


def test_traffic_grows_with_ranks_up_to_the_buffer_size() -> None:
    network = network_of("h100")
    assert network.group(1, 1).all_gather_s(LARGE) == network.group(1, 1).all_reduce_s(LARGE) == 0
    two, eight = network.group(2, 1).all_gather_s(LARGE), network.group(8, 1).all_gather_s(LARGE)
    assert eight / two == pytest.approx((7 / 8) / (1 / 2), rel=0.01)
    assert eight < LARGE / network.link_bytes_s + 1e-4


def test_latency_of_small_messages_grows_with_ranks() -> None:
    network = network_of("h100")
    few, many = network.group(16, 1), network.group(1024, 1)
    assert network.group(8, 1).latency_s < few.latency_s < many.latency_s
    # A ring of n ranks has n - 1 steps, each as slow as its slowest hop.
    step_s = few.latency_s - network.group(8, 1).latency_s
    assert many.latency_s - network.group(8, 1).latency_s == pytest.approx(step_s * 1023 / 15)
    assert few.all_gather_s(LARGE, calls=1000) - few.all_gather_s(LARGE, calls=1) == pytest.approx(999 * few.latency_s)


def test_measured_rates_replace_catalog() -> None:
    measured = MeasuredRates(
        gemm_tflops=300.0, gemm_dtype="bf16", node_bus_gb_s=111.0, fabric_bus_gb_s=7.0, device="NVIDIA H100 80GB HBM3"
    )
    profile = ClusterProfile(measured=measured)
    from_profile, from_catalog = (build_machine(gpu("h100"), 8, "bf16", p) for p in (profile, ClusterProfile()))
    assert (from_profile.network.link_bytes_s, from_profile.network.fabric_bytes_s) == (
        111e9 * MESSAGE_SIZE_FACTOR,
        7e9 * MESSAGE_SIZE_FACTOR,
    )
    # Less than measured, because a step heats the GPU more than one matmul does.
    assert from_profile.rates.matmul == from_profile.rates.half < 300e12 < from_catalog.rates.matmul
    assert from_profile.rates.memory == from_catalog.rates.memory
    # Rates that were measured on another GPU type are ignored.
    assert build_machine(gpu("a100"), 8, "bf16", profile) == build_machine(gpu("a100"), 8, "bf16", ClusterProfile())

"""Seconds of collectives: which wires they use, and how they grow."""

from __future__ import annotations

import pytest

from clustertrain.config import hardware
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.hardware import GpuType
from clustertrain.plan.cost import collectives
from clustertrain.plan.cost.collectives import Network
from clustertrain.plan.cost.hardware_rates import MESSAGE_SIZE_FACTOR, build_machine

LARGE = 1 << 36  # bytes, beside which latency does not count


def gpu(name: str) -> GpuType:
    found = hardware.find_gpu_type(name)
    assert found is not None
    return found


def cluster(name: str, gpus_per_node: int = 8) -> Network:
    return collectives.build_network(gpu(name), gpus_per_node)


def test_a_ring_inside_a_node_uses_its_links() -> None:
    of = cluster("h100")
    for size, stride in ((2, 1), (8, 1), (2, 4), (4, 2)):
        group = of.group(size, stride)
        assert (group.nodes, group.bytes_s) == (1, of.link_bytes_s)


def test_a_ring_across_nodes_shares_the_fabric_of_its_ranks_in_a_node() -> None:
    of = cluster("h100")
    alone, four, whole = of.group(4, 8), of.group(16, 2), of.group(32, 1)
    assert (alone.nodes, alone.bytes_s) == (4, of.fabric_bytes_s)  # one rank of each node: its own share
    assert (four.nodes, four.bytes_s) == (4, 4 * of.fabric_bytes_s)
    assert (
        whole.nodes == 4 and whole.bytes_s == of.link_bytes_s < 8 * of.fabric_bytes_s
    )  # then the links are the narrow place
    # The same ranks take longer across nodes.
    assert of.group(8, 8).all_gather_s(LARGE) > of.group(8, 1).all_gather_s(LARGE)


def test_gpus_without_links_talk_over_pcie() -> None:
    assert cluster("l4").group(4, 1).bytes_s == collectives.PCIE_GB_S * 1e9 < cluster("a100").link_bytes_s


def test_the_links_of_an_nvl72_join_nodes() -> None:
    of = cluster("gb200", gpus_per_node=4)
    assert of.group(72, 1).nodes == 1 and of.group(72, 1).bytes_s == of.link_bytes_s
    assert of.group(8, 9).nodes == 1
    assert of.group(144, 1).nodes == 2


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for size, stride in ((8, 1), (64, 1), (4, 8)):
        group = cluster("a100").group(size, stride)
        assert group.all_reduce_s(LARGE, 3) == pytest.approx(2 * group.all_gather_s(LARGE, 3))


def test_traffic_grows_with_ranks_up_to_whole() -> None:
    of = cluster("h100")
    assert of.group(1, 1).all_gather_s(LARGE) == of.group(1, 1).all_reduce_s(LARGE) == 0
    two, eight = of.group(2, 1).all_gather_s(LARGE), of.group(8, 1).all_gather_s(LARGE)
    assert eight / two == pytest.approx((7 / 8) / (1 / 2), rel=0.01)
    assert eight < LARGE / of.link_bytes_s + 1e-4


def test_many_small_messages_cost_latency_that_grows_with_the_nodes() -> None:
    of = cluster("h100")
    few, many = of.group(16, 1), of.group(1024, 1)
    assert of.group(8, 1).latency_s < few.latency_s < many.latency_s
    assert few.all_gather_s(LARGE, calls=1000) - few.all_gather_s(LARGE, calls=1) == pytest.approx(999 * few.latency_s)


def test_measured_rates_replace_catalogue() -> None:
    measured = MeasuredRates(
        gemm_tflops=300.0, gemm_dtype="bf16", node_bus_gb_s=111.0, fabric_bus_gb_s=7.0, device="NVIDIA H100 80GB HBM3"
    )
    profile = ClusterProfile(measured=measured)
    found, book = (build_machine(gpu("h100"), 8, "bf16", p) for p in (profile, ClusterProfile()))
    assert (found.network.link_bytes_s, found.network.fabric_bytes_s) == (
        111e9 * MESSAGE_SIZE_FACTOR,
        7e9 * MESSAGE_SIZE_FACTOR,
    )
    assert (
        found.rates.matmul == found.rates.half < 300e12 < book.rates.matmul
    )  # below: a step is hotter than one matmul
    assert found.rates.memory == book.rates.memory
    # Measured on other GPUs it says nothing of these.
    assert build_machine(gpu("a100"), 8, "bf16", profile) == build_machine(gpu("a100"), 8, "bf16", ClusterProfile())

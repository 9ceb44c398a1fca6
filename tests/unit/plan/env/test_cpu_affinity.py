"""Binding of ranks to the CPUs near their GPUs, only if no rank loses CPUs by it."""

from __future__ import annotations

from clustertrain.config.node_facts import Cpus, Gpu, NodeFacts, NumaNode
from clustertrain.plan.env.cpu_affinity import bind_to_gpu_numa


def node(*homes: int | None, cpus: tuple[str, ...] = ("0-3,8-11", "4-7,12-15")) -> NodeFacts:
    return NodeFacts(
        gpus=tuple(Gpu(index=i, numa_node=home) for i, home in enumerate(homes)),
        cpus=Cpus(numa_nodes=tuple(NumaNode(index=i, cpus=c) for i, c in enumerate(cpus))),
    )


FIRST, SECOND = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)


def test_ranks_bind_to_gpu_numa_node() -> None:
    assert bind_to_gpu_numa(node(1, 0, 0, 1), 4, range(16)).cpus == (SECOND, FIRST, FIRST, SECOND)


def test_binding_respects_job_cpus() -> None:
    assert bind_to_gpu_numa(node(0, 1), 2, (0, 1, 4, 5)).cpus == ((0, 1), (4, 5))


def test_no_binding_if_ranks_lose_cpus() -> None:
    both_on_one = bind_to_gpu_numa(node(0, 0), 2, range(16))
    assert both_on_one.cpus == () and "less than their share" in both_on_one.reason
    assert bind_to_gpu_numa(node(0, 1), 2, (0, 1, 2, 4)).cpus == ()
    # The job has no CPU on the third NUMA node.
    assert bind_to_gpu_numa(node(0, 2, cpus=("0-1", "2-3", "4-5")), 2, range(4)).cpus == ()
    assert bind_to_gpu_numa(node(0), 1, range(16)).cpus == ()


def test_no_binding_if_unknown_or_pointless() -> None:
    assert bind_to_gpu_numa(node(0, None), 2, range(16)).cpus == ()
    assert bind_to_gpu_numa(node(0, 5), 2, range(16)).cpus == ()
    assert bind_to_gpu_numa(node(0), 2, range(16)).cpus == ()
    assert bind_to_gpu_numa(node(0, 0, cpus=("0-15",)), 2, range(16)).cpus == ()
    assert bind_to_gpu_numa(node(0, 1), 2, (4, 5)).reason == "all CPUs of the job are on one NUMA node"

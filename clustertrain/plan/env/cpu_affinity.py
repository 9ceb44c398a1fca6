"""CPU affinity: binds each rank of a node to the CPUs of its GPU's NUMA node. Pure.

torchrun's ``--numa-binding`` (torch/numa/binding.py) ends the job if numactl is missing or the job has no CPU on that
NUMA node; here nothing is bound in these cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from clustertrain.config.node_facts import NodeFacts, parse_cpu_list


class CpuBinding(NamedTuple):
    """CPUs per local rank, or the reason for not binding."""

    cpus: tuple[tuple[int, ...], ...]
    """By local rank; empty if nothing is bound."""
    reason: str


def bind_to_gpu_numa(facts: NodeFacts, ranks: int, allowed: Collection[int]) -> CpuBinding:
    """Return the binding, if every rank keeps at least its share of the CPUs that the job may use.

    Args:
        ranks: local ranks; rank i drives ``facts.gpus[i]``.
        allowed: CPUs that the job may use on this node.
    """
    usable = {n.index: parse_cpu_list(n.cpus) & set(allowed) for n in facts.cpus.numa_nodes}
    cpus_by_node = {index: cpus for index, cpus in usable.items() if cpus}
    gpu_nodes = [gpu.numa_node for gpu in facts.gpus[:ranks]]
    if len(cpus_by_node) < 2:
        return CpuBinding((), "all CPUs of the job are on one NUMA node")
    if ranks == 0 or len(gpu_nodes) < ranks or any(node not in cpus_by_node for node in gpu_nodes):
        return CpuBinding((), "not every rank's GPU has a NUMA node with CPUs of the job")
    rank_cpus = max(1, len(allowed) // ranks)
    for node, rank_count in Counter(gpu_nodes).items():
        if node is not None and len(cpus_by_node[node]) < rank_cpus * rank_count:
            available = f"{len(cpus_by_node[node])} of the job's CPUs for {rank_count} ranks"
            return CpuBinding((), f"NUMA node {node} has {available}, less than their share")
    bindings = tuple(tuple(sorted(cpus_by_node[node])) for node in gpu_nodes if node is not None)
    return CpuBinding(
        bindings, "each rank on the CPUs of its GPU's NUMA node; memory and PCIe of another node are slower"
    )

"""Which processors each rank of a node is bound to: those of its GPU's NUMA node. Pure.

torchrun's own ``--numa-binding`` (torch/numa/binding.py) ends the job where numactl is not installed or the job has no
processor on that NUMA node; this one is then simply not done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from clustertrain.config.node_facts import NodeFacts, cpu_numbers


class Binding(NamedTuple):
    """``cpus`` by local rank; empty where nothing is bound."""

    cpus: tuple[tuple[int, ...], ...]
    reason: str


def near_gpus(facts: NodeFacts, ranks: int, allowed: Collection[int]) -> Binding:
    """Bind only where every rank keeps at least its share of the processors that the job may use.

    Args:
        ranks: local ranks; rank i drives ``facts.gpus[i]``.
        allowed: the processors that the job may use on this node.
    """
    usable = {n.index: cpu_numbers(n.cpus) & set(allowed) for n in facts.cpus.numa_nodes}
    nodes = {index: cpus for index, cpus in usable.items() if cpus}
    homes = [gpu.numa_node for gpu in facts.gpus[:ranks]]
    if len(nodes) < 2:
        return Binding((), "all the job's processors are on one NUMA node")
    if ranks == 0 or len(homes) < ranks or any(home not in nodes for home in homes):
        return Binding((), "not every rank's GPU has a NUMA node with processors of the job")
    share = max(1, len(allowed) // ranks)
    for home, there in Counter(homes).items():
        if home is not None and len(nodes[home]) < share * there:
            has = f"{len(nodes[home])} of the job's processors for {there} ranks"
            return Binding((), f"NUMA node {home} has {has}, less than their share")
    bound = tuple(tuple(sorted(nodes[home])) for home in homes if home is not None)
    return Binding(
        bound, "each rank on the processors of its GPU's NUMA node; memory and PCIe of another one are further"
    )

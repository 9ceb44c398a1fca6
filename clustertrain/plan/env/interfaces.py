"""Which network interface and which RDMA ports the training traffic belongs on, from what a node is made of. Pure.

A choice that the facts do not force is not made: NCCL's own search knows the PCI tree and every GPU's nearest port.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple

from clustertrain.config.node_facts import Hca, Interface, NodeFacts

_CARRIES = ("ethernet", "infiniband", "bond", "bridge", "vlan")
# Ten times slower than a neighbour, and never more than this where RDMA carries the bulk: a management port.
_MANAGEMENT_RATIO = 10
_MANAGEMENT_GBIT = 1.0
_MOST_NAMED = 6


class Choice(NamedTuple):
    value: str
    reason: str


def training_ports(facts: NodeFacts) -> tuple[Hca, ...]:
    """The active RDMA ports of the kind (link layer and rate) that has the most bandwidth together: the eight of the
    compute fabric, not the one or two of storage, however fast each is."""
    kinds: dict[tuple[str, float], list[Hca]] = {}
    for hca in facts.hcas:
        if hca.state == "active":
            kinds.setdefault((hca.link_layer, hca.rate_gbit or 0.0), []).append(hca)
    if not kinds:
        return ()
    best = max(kinds, key=lambda kind: (kind[1] * len(kinds[kind]), kind[0] == "InfiniBand", kind[1]))
    return tuple(kinds[best])


def hcas(facts: NodeFacts) -> Choice | None:
    """The value of NCCL_IB_HCA where an active port has to be left out; None where NCCL would take the same ones."""
    ports = training_ports(facts)
    others = [h for h in facts.hcas if h not in ports]
    if not any(h.state == "active" for h in others):
        return None
    value = "=" + ",".join(f"{h.name}:{h.port}" for h in ports)
    kind = f"{len(ports)} x {ports[0].link_layer} at {ports[0].rate_gbit or 0:g} Gbit/s"
    left = _named(f"{h.name}:{h.port} ({_words(h)})" for h in others)
    return Choice(value, f"the active ports with the most bandwidth together, {kind}; left out: {left}")


def gid_index(facts: NodeFacts) -> Choice | None:
    """The value of NCCL_IB_GID_INDEX where all ports hold their one routable address at the same index."""
    ports = training_ports(facts)
    found = {h.roce_v2_ipv4_gid_index for h in ports}
    if not ports or ports[0].link_layer != "Ethernet" or len(found) != 1 or None in found:
        return None
    return Choice(
        str(found.pop()),
        "RoCE v2 with an IPv4 address, the only such entry of every port; what NCCL from 2.21 on finds itself, pinned",
    )


def interface(facts: NodeFacts, towards: str = "") -> Choice | None:
    """The interface for sockets: NCCL's bootstrap, gloo, and all of NCCL's traffic where there is no RDMA.

    Args:
        towards: the one that leads to the other nodes by the kernel's routes; it stays unless it is a management port.
    """
    rails = {h.netdev for h in training_ports(facts) if h.link_layer == "Ethernet"}
    bulk_elsewhere = bool(training_ports(facts)) or any(d.state == "active" for d in facts.efa)
    real = [i for i in facts.interfaces if _fit(i)]
    shared = [i for i in real if i.name not in rails]
    management = {i.name for i in real if _management(i, shared, real, bulk_elsewhere)}
    # A rail of RoCE is often a network of its own, from which the other rails are not reached.
    usable = [i for i in shared if i.name not in management] or [i for i in real if i.name not in management]
    if not usable:
        return None
    left = _named(_why_not(i, management) for i in facts.interfaces if i not in real or i.name in management)
    more = f"; left out: {left}" if left else ""
    if any(i.name == towards for i in usable):
        return Choice(towards, f"it leads to the other nodes{more}")
    best = max(usable, key=lambda i: (_reaches(i), i.default_route, i.speed_gbit or 0.0))
    why = "it holds the default route" if best.default_route else "the fastest one that is up and has an address"
    return Choice(best.name, f"{why}{more}")


def notes(facts: NodeFacts) -> list[str]:
    """What is wrong with this node's network and no setting can mend, in sentences."""
    said = []
    if any(d.state == "active" for d in facts.efa) and not facts.aws_ofi_nccl:
        said.append(
            f"{len(facts.efa)} EFA devices, and no libnccl-net*.so of aws-ofi-nccl seen: without it NCCL uses TCP"
        )
    if facts.hcas and not training_ports(facts):
        said.append(f"no RDMA port is active ({_named(f'{h.name}:{h.port}' for h in facts.hcas)}): NCCL uses TCP")
    rails = [h for h in training_ports(facts) if h.link_layer == "Ethernet"]
    if len({h.roce_v2_ipv4_gid_index for h in rails}) > 1:
        seen = _named(f"{h.name}:{h.port} {_index(h)}" for h in rails)
        said.append(f"the RoCE v2 GIDs with an IPv4 address differ in their index ({seen}): left to NCCL")
    for gpu in facts.gpus:
        if gpu.nvlinks_active is not None and gpu.nvlinks_total and 0 < gpu.nvlinks_active < gpu.nvlinks_total:
            said.append(f"GPU {gpu.index}: {gpu.nvlinks_active} of {gpu.nvlinks_total} NVLinks are up")
    return said


def _fit(i: Interface) -> bool:
    return i.state == "up" and bool(i.addresses) and i.kind in _CARRIES and not i.master


def _management(i: Interface, shared: list[Interface], real: list[Interface], bulk_elsewhere: bool) -> bool:
    if i.speed_gbit is None:
        return False
    slow = i.speed_gbit <= _MANAGEMENT_GBIT
    peers = real if slow else shared
    fastest = max((p.speed_gbit or 0.0 for p in peers), default=0.0)
    return (slow or not bulk_elsewhere) and fastest >= _MANAGEMENT_RATIO * i.speed_gbit


def _reaches(i: Interface) -> bool:
    """Whether its network has room for other nodes; a rail is often a /31 to its switch and no more."""
    return i.default_route or any(_room(address) for address in i.addresses)


def _room(address: str) -> bool:
    try:
        return ipaddress.ip_interface(address).network.num_addresses > 4
    except ValueError:
        return False


def _why_not(i: Interface, management: set[str]) -> str:
    if i.name in management:
        return f"{i.name} ({i.speed_gbit:g} Gbit/s, management)"
    if i.kind not in _CARRIES:
        return f"{i.name} ({i.kind})"
    if i.master:
        return f"{i.name} (part of {i.master})"
    return f"{i.name} ({'no address' if i.state == 'up' else i.state})"


def _words(hca: Hca) -> str:
    return f"{hca.link_layer}, {hca.rate_gbit or 0:g} Gbit/s" if hca.state == "active" else hca.state


def _index(hca: Hca) -> str:
    return "none" if hca.roce_v2_ipv4_gid_index is None else str(hca.roce_v2_ipv4_gid_index)


def _named(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return ", ".join(every[:_MOST_NAMED]) + more

"""Choice of network interface and RDMA ports for training traffic from the facts of a node. Pure.

Only choices that the facts require are made: NCCL's search knows the PCI tree and every GPU's nearest port.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple

from clustertrain.config.node_facts import Hca, Interface, NodeFacts

_DATA_KINDS = ("ethernet", "infiniband", "bond", "bridge", "vlan")
# A management port is ten times slower than another one, and at most this fast if RDMA carries the bulk.
_MANAGEMENT_RATIO = 10
_MANAGEMENT_GBIT = 1.0
_MAX_NAMED = 6


class NetworkSelection(NamedTuple):
    """Value of a network setting and its reason."""

    value: str
    reason: str


def find_training_ports(facts: NodeFacts) -> tuple[Hca, ...]:
    """Return the active RDMA ports of the kind (link layer and rate) with the most total bandwidth.

    These are the eight of the compute fabric, not the one or two of storage, however fast each is.
    """
    ports_by_kind: dict[tuple[str, float], list[Hca]] = {}
    for hca in facts.hcas:
        if hca.state == "active":
            ports_by_kind.setdefault((hca.link_layer, hca.rate_gbit or 0.0), []).append(hca)
    if not ports_by_kind:
        return ()
    best = max(ports_by_kind, key=lambda kind: (kind[1] * len(ports_by_kind[kind]), kind[0] == "InfiniBand", kind[1]))
    return tuple(ports_by_kind[best])


def select_hcas(facts: NodeFacts) -> NetworkSelection | None:
    """Return the value of NCCL_IB_HCA that excludes other active ports; None if NCCL would use the same ports."""
    ports = find_training_ports(facts)
    others = [h for h in facts.hcas if h not in ports]
    if not any(h.state == "active" for h in others):
        return None
    value = "=" + ",".join(f"{h.name}:{h.port}" for h in ports)
    kind = f"{len(ports)} x {ports[0].link_layer} at {ports[0].rate_gbit or 0:g} Gbit/s"
    excluded = _join_names(f"{h.name}:{h.port} ({_describe_port(h)})" for h in others)
    return NetworkSelection(value, f"the active ports with the most total bandwidth, {kind}; excluded: {excluded}")


def select_gid_index(facts: NodeFacts) -> NetworkSelection | None:
    """Return the value of NCCL_IB_GID_INDEX if all ports have their only routable address at the same index."""
    ports = find_training_ports(facts)
    indices = {h.roce_v2_ipv4_gid_index for h in ports}
    if not ports or ports[0].link_layer != "Ethernet" or len(indices) != 1 or None in indices:
        return None
    return NetworkSelection(
        str(indices.pop()),
        "RoCE v2 with an IPv4 address, the only such entry of every port; NCCL 2.21 and later choose it too, pinned",
    )


def select_interface(facts: NodeFacts, route_interface: str = "") -> NetworkSelection | None:
    """Return the interface for sockets: NCCL's bootstrap, gloo, and all NCCL traffic without RDMA.

    Args:
        route_interface: interface that the kernel routes to the other nodes; chosen unless it is a management port.
    """
    rail_names = {h.netdev for h in find_training_ports(facts) if h.link_layer == "Ethernet"}
    has_rdma = bool(find_training_ports(facts)) or any(d.state == "active" for d in facts.efa)
    candidates = [i for i in facts.interfaces if _is_candidate(i)]
    non_rails = [i for i in candidates if i.name not in rail_names]
    management = {i.name for i in candidates if _is_management(i, non_rails, candidates, has_rdma)}
    # A RoCE rail is often a separate network that cannot reach the other rails.
    usable = [i for i in non_rails if i.name not in management] or [i for i in candidates if i.name not in management]
    if not usable:
        return None
    excluded = _join_names(
        _exclusion_reason(i, management) for i in facts.interfaces if i not in candidates or i.name in management
    )
    note = f"; excluded: {excluded}" if excluded else ""
    if any(i.name == route_interface for i in usable):
        return NetworkSelection(route_interface, f"it is the route to the other nodes{note}")
    best = max(usable, key=lambda i: (_can_reach_nodes(i), i.default_route, i.speed_gbit or 0.0))
    reason = "it has the default route" if best.default_route else "the fastest one that is up and has an address"
    return NetworkSelection(best.name, f"{reason}{note}")


def find_network_problems(facts: NodeFacts) -> list[str]:
    """Return sentences on network problems of this node that no setting can fix."""
    problems = []
    if any(d.state == "active" for d in facts.efa) and not facts.aws_ofi_nccl:
        problems.append(
            f"{len(facts.efa)} EFA devices, but libnccl-net*.so of aws-ofi-nccl was not found: without it NCCL uses TCP"
        )
    if facts.hcas and not find_training_ports(facts):
        problems.append(
            f"no RDMA port is active ({_join_names(f'{h.name}:{h.port}' for h in facts.hcas)}): NCCL uses TCP"
        )
    rails = [h for h in find_training_ports(facts) if h.link_layer == "Ethernet"]
    if len({h.roce_v2_ipv4_gid_index for h in rails}) > 1:
        gid_indices = _join_names(f"{h.name}:{h.port} {_format_gid_index(h)}" for h in rails)
        problems.append(f"the indices of the RoCE v2 GIDs with an IPv4 address differ ({gid_indices}): NCCL chooses")
    for gpu in facts.gpus:
        if gpu.nvlinks_active is not None and gpu.nvlinks_total and 0 < gpu.nvlinks_active < gpu.nvlinks_total:
            problems.append(f"GPU {gpu.index}: {gpu.nvlinks_active} of {gpu.nvlinks_total} NVLinks are up")
    return problems


def _is_candidate(nic: Interface) -> bool:
    return nic.state == "up" and bool(nic.addresses) and nic.kind in _DATA_KINDS and not nic.master


def _is_management(nic: Interface, non_rails: list[Interface], candidates: list[Interface], has_rdma: bool) -> bool:
    if nic.speed_gbit is None:
        return False
    is_slow = nic.speed_gbit <= _MANAGEMENT_GBIT
    peers = candidates if is_slow else non_rails
    fastest = max((p.speed_gbit or 0.0 for p in peers), default=0.0)
    return (is_slow or not has_rdma) and fastest >= _MANAGEMENT_RATIO * nic.speed_gbit


def _can_reach_nodes(nic: Interface) -> bool:
    """Return whether the interface's network has room for other nodes; a rail is often only a /31 to its switch."""
    return nic.default_route or any(_has_peers(address) for address in nic.addresses)


def _has_peers(address: str) -> bool:
    try:
        return ipaddress.ip_interface(address).network.num_addresses > 4
    except ValueError:
        return False


def _exclusion_reason(nic: Interface, management: set[str]) -> str:
    if nic.name in management:
        return f"{nic.name} ({nic.speed_gbit:g} Gbit/s, management)"
    if nic.kind not in _DATA_KINDS:
        return f"{nic.name} ({nic.kind})"
    if nic.master:
        return f"{nic.name} (part of {nic.master})"
    return f"{nic.name} ({'no address' if nic.state == 'up' else nic.state})"


def _describe_port(hca: Hca) -> str:
    return f"{hca.link_layer}, {hca.rate_gbit or 0:g} Gbit/s" if hca.state == "active" else hca.state


def _format_gid_index(hca: Hca) -> str:
    return "none" if hca.roce_v2_ipv4_gid_index is None else str(hca.roce_v2_ipv4_gid_index)


def _join_names(names: Iterable[str]) -> str:
    all_names = list(names)
    suffix = f" and {len(all_names) - _MAX_NAMED} more" if len(all_names) > _MAX_NAMED else ""
    return ", ".join(all_names[:_MAX_NAMED]) + suffix

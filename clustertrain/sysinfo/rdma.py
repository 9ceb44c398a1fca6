"""RDMA devices from /sys/class/infiniband: InfiniBand and RoCE ports, and AWS's EFA.

Files and their meaning: the kernel's Documentation/ABI/stable/sysfs-class-infiniband and
ABI/testing/sysfs-class-infiniband (gid_attrs).
"""

from __future__ import annotations

import re

from clustertrain.config.node_facts import EfaDevice, Hca, LinkLayer, PortState
from clustertrain.sysinfo.sysfs import Sysfs

RDMA = "/sys/class/infiniband"
_LAYERS: dict[str, LinkLayer] = {"InfiniBand": "InfiniBand", "Ethernet": "Ethernet"}
_RNIC = "4:"  # node_type of iWARP, which NCCL does not speak
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"


def devices(tree: Sysfs) -> tuple[tuple[Hca, ...], tuple[EfaDevice, ...]]:
    """Every port of every device."""
    hcas: list[Hca] = []
    efa: list[EfaDevice] = []
    for name in tree.names(RDMA):
        here = f"{RDMA}/{name}"
        pci_address = tree.target(f"{here}/device").rpartition("/")[2]
        numa_node = tree.number(f"{here}/device/numa_node")
        if tree.target(f"{here}/device/driver").endswith("/efa"):
            state, rate_gbit = _state(tree, f"{here}/ports/1"), _rate(tree, f"{here}/ports/1")
            efa.append(
                EfaDevice(name=name, state=state, rate_gbit=rate_gbit, pci_address=pci_address, numa_node=numa_node)
            )
        elif not tree.text(f"{here}/node_type").startswith(_RNIC):
            ports = [int(port) for port in tree.names(f"{here}/ports") if port.isdigit()]
            hcas.extend(_port(tree, name, port, pci_address, numa_node) for port in ports)
    return tuple(hcas), tuple(efa)


def _port(tree: Sysfs, name: str, port: int, pci_address: str, numa_node: int | None) -> Hca:
    here = f"{RDMA}/{name}/ports/{port}"
    layer = _LAYERS.get(tree.text(f"{here}/link_layer"), "unknown")
    return Hca(
        name=name,
        port=port,
        state=_state(tree, here),
        link_layer=layer,
        rate_gbit=_rate(tree, here),
        netdev=_netdev(tree, name, port),
        roce_v2_ipv4_gid_index=_gid_index(tree, here) if layer == "Ethernet" else None,
        pci_address=pci_address,
        numa_node=numa_node,
    )


def _state(tree: Sysfs, here: str) -> PortState:
    """``4: ACTIVE``; all the others (DOWN, INIT, ARMED) carry no traffic."""
    text = tree.text(f"{here}/state")
    if not re.match(r"\d+: ", text):
        return "unknown"
    return "active" if text.startswith("4:") else "down"


def _rate(tree: Sysfs, here: str) -> float | None:
    """``400 Gb/sec (4X NDR)``."""
    text = tree.text(f"{here}/rate")
    found = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text)
    if text and not found:
        tree.garbage(f"{here}/rate", text, "a rate")
    return float(found[1]) if found else None


def _netdev(tree: Sysfs, name: str, port: int) -> str:
    """Of a device with two ports, each has an interface that counts its port from 0."""
    here = f"{RDMA}/{name}"
    named = tree.text(f"{here}/ports/{port}/gid_attrs/ndevs/0")
    if named:
        return named
    candidates = tree.names(f"{here}/device/net")
    if len(candidates) > 1:
        candidates = [c for c in candidates if tree.number(f"{here}/device/net/{c}/dev_port") == port - 1]
    return candidates[0] if len(candidates) == 1 else ""


def _gid_index(tree: Sysfs, here: str) -> int | None:
    """The index of the one RoCE v2 GID that holds an IPv4 address. Two of them: which one is routed cannot be told."""
    found = [
        int(index)
        for index in tree.names(f"{here}/gid_attrs/types")
        if index.isdigit()
        and tree.text(f"{here}/gid_attrs/types/{index}") == "RoCE v2"
        and tree.text(f"{here}/gids/{index}").lower().startswith(_IPV4_MAPPED)
    ]
    return found[0] if len(found) == 1 else None

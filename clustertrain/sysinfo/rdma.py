"""Read RDMA devices from /sys/class/infiniband: InfiniBand and RoCE ports, and AWS EFA.

The files are documented in the kernel's Documentation/ABI/stable/sysfs-class-infiniband and
ABI/testing/sysfs-class-infiniband (gid_attrs).
"""

from __future__ import annotations

import re

from clustertrain.config.node_facts import EfaDevice, Hca, LinkLayer, PortState
from clustertrain.sysinfo.sysfs import Sysfs

RDMA = "/sys/class/infiniband"
_LINK_LAYERS: dict[str, LinkLayer] = {"InfiniBand": "InfiniBand", "Ethernet": "Ethernet"}
_IWARP_NODE_TYPE = "4:"  # node_type of iWARP, which NCCL does not support
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"


def read_devices(tree: Sysfs) -> tuple[tuple[Hca, ...], tuple[EfaDevice, ...]]:
    """Return every port of the InfiniBand and RoCE devices, and the EFA devices."""
    hcas: list[Hca] = []
    efa: list[EfaDevice] = []
    for name in tree.list_names(RDMA):
        path = f"{RDMA}/{name}"
        pci_address = tree.read_link(f"{path}/device").rpartition("/")[2]
        numa_node = tree.read_number(f"{path}/device/numa_node")
        if tree.read_link(f"{path}/device/driver").endswith("/efa"):
            state, rate_gbit = _port_state(tree, f"{path}/ports/1"), _read_rate(tree, f"{path}/ports/1")
            efa.append(
                EfaDevice(name=name, state=state, rate_gbit=rate_gbit, pci_address=pci_address, numa_node=numa_node)
            )
        elif not tree.read_text(f"{path}/node_type").startswith(_IWARP_NODE_TYPE):
            ports = [int(port) for port in tree.list_names(f"{path}/ports") if port.isdigit()]
            hcas.extend(_read_port(tree, name, port, pci_address, numa_node) for port in ports)
    return tuple(hcas), tuple(efa)


def _read_port(tree: Sysfs, name: str, port: int, pci_address: str, numa_node: int | None) -> Hca:
    path = f"{RDMA}/{name}/ports/{port}"
    layer = _LINK_LAYERS.get(tree.read_text(f"{path}/link_layer"), "unknown")
    return Hca(
        name=name,
        port=port,
        state=_port_state(tree, path),
        link_layer=layer,
        rate_gbit=_read_rate(tree, path),
        netdev=_find_netdev(tree, name, port),
        roce_v2_ipv4_gid_index=_find_gid_index(tree, path) if layer == "Ethernet" else None,
        pci_address=pci_address,
        numa_node=numa_node,
    )


def _port_state(tree: Sysfs, path: str) -> PortState:
    """Parse a state such as ``4: ACTIVE``; all others (DOWN, INIT, ARMED) carry no traffic."""
    text = tree.read_text(f"{path}/state")
    if not re.match(r"\d+: ", text):
        return "unknown"
    return "active" if text.startswith("4:") else "down"


def _read_rate(tree: Sysfs, path: str) -> float | None:
    """Parse a rate such as ``400 Gb/sec (4X NDR)`` to Gbit/s."""
    text = tree.read_text(f"{path}/rate")
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text)
    if text and not match:
        tree.note_unparsable(f"{path}/rate", text, "a rate")
    return float(match[1]) if match else None


def _find_netdev(tree: Sysfs, name: str, port: int) -> str:
    """Return the network interface of a port; with two ports, the interface's ``dev_port`` counts from 0."""
    path = f"{RDMA}/{name}"
    ndev = tree.read_text(f"{path}/ports/{port}/gid_attrs/ndevs/0")
    if ndev:
        return ndev
    candidates = tree.list_names(f"{path}/device/net")
    if len(candidates) > 1:
        candidates = [c for c in candidates if tree.read_number(f"{path}/device/net/{c}/dev_port") == port - 1]
    return candidates[0] if len(candidates) == 1 else ""


def _find_gid_index(tree: Sysfs, path: str) -> int | None:
    """Return the index of the only RoCE v2 GID with an IPv4 address, or None if there are none or several."""
    indices = [
        int(index)
        for index in tree.list_names(f"{path}/gid_attrs/types")
        if index.isdigit()
        and tree.read_text(f"{path}/gid_attrs/types/{index}") == "RoCE v2"
        and tree.read_text(f"{path}/gids/{index}").lower().startswith(_IPV4_MAPPED)
    ]
    return indices[0] if len(indices) == 1 else None

"""Read network interfaces from /sys/class/net, and their addresses from ``ip -j``.

The files are documented in the kernel's Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

import msgspec

from clustertrain import schema
from clustertrain.config.node_facts import Interface, InterfaceKind
from clustertrain.sysinfo.sysfs import Sysfs

NET = "/sys/class/net"
T = TypeVar("T")
# include/uapi/linux/if_arp.h
_ARPHRD_INFINIBAND, _ARPHRD_LOOPBACK = 32, 772


class IpOutput(NamedTuple):
    """The output of ``ip -j address`` and ``ip -j route``; empty if the command is missing."""

    address: str = ""
    route: str = ""


class _Address(msgspec.Struct):
    local: str = ""
    prefixlen: int = 0
    scope: str = ""


class _Link(msgspec.Struct):
    ifname: str = ""
    addr_info: list[_Address] = []


class _Route(msgspec.Struct):
    dst: str = ""
    dev: str = ""


def read_interfaces(tree: Sysfs, ip: IpOutput, fabric_gbit: Mapping[str, float]) -> tuple[Interface, ...]:
    """Return all interfaces; ``fabric_gbit`` holds RDMA rates by interface, for interfaces that report no speed."""
    addresses = {
        link.ifname: tuple(f"{a.local}/{a.prefixlen}" for a in link.addr_info if a.local and a.scope != "link")
        for link in _decode(tree, "ip -j address", ip.address, list[_Link])
    }
    default = {r.dev for r in _decode(tree, "ip -j route", ip.route, list[_Route]) if r.dst == "default"}
    result = []
    for name in tree.list_names(NET):
        path = f"{NET}/{name}"
        if not tree.exists(f"{path}/type"):
            continue  # bonding_masters is a file
        speed = tree.read_number(f"{path}/speed")
        result.append(
            Interface(
                name=name,
                kind=_interface_kind(tree, path),
                state=_link_state(tree, path),
                addresses=addresses.get(name, ()),
                speed_gbit=speed / 1000 if speed else fabric_gbit.get(name),
                default_route=name in default,
                master=tree.read_link(f"{path}/master").rpartition("/")[2],
                numa_node=tree.read_number(f"{path}/device/numa_node"),
            )
        )
    return tuple(result)


def _decode(tree: Sysfs, command: str, text: str, target_type: type[list[T]]) -> list[T]:
    if not text.strip():
        return []
    try:
        return schema.decode(text, target_type)
    except msgspec.DecodeError as e:
        tree.read_errors.append(f"{command}: {e}")
        return []


def _link_state(tree: Sysfs, path: str) -> Literal["up", "down", "unknown"]:
    state = tree.read_text(f"{path}/operstate")
    if state == "unknown":  # some drivers do not report the state; use the carrier
        return "up" if tree.read_number(f"{path}/carrier") else "unknown"
    return "up" if state == "up" else "down" if state else "unknown"


def _interface_kind(tree: Sysfs, path: str) -> InterfaceKind:
    arp_type, device = tree.read_number(f"{path}/type"), tree.read_link(path)
    if arp_type == _ARPHRD_LOOPBACK:
        return "loopback"
    if arp_type == _ARPHRD_INFINIBAND:
        return "infiniband"
    if tree.exists(f"{path}/bonding"):
        return "bond"
    if tree.exists(f"{path}/phy80211"):
        return "wireless"
    if "/virtual/" not in device:
        return "usb" if "/usb" in device else "ethernet"
    if "DEVTYPE=vlan" in tree.read_text(f"{path}/uevent"):
        return "vlan"
    ports = tree.list_names(f"{path}/brif")
    return "bridge" if any("/virtual/" not in tree.read_link(f"{NET}/{port}") for port in ports) else "virtual"

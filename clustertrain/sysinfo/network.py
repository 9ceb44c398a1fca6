"""Network interfaces: what they are from /sys/class/net, their addresses from ``ip -j``.

Files and their meaning: the kernel's Documentation/ABI/testing/sysfs-class-net.
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
_INFINIBAND, _LOOPBACK = 32, 772


class IpOutput(NamedTuple):
    """What ``ip -j address`` and ``ip -j route`` print; empty where the command is missing."""

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


def interfaces(tree: Sysfs, ip: IpOutput, fabric_gbit: Mapping[str, float]) -> tuple[Interface, ...]:
    """All interfaces. ``fabric_gbit``: rates by interface, for those of RDMA devices that name no speed themselves."""
    addresses = {
        link.ifname: tuple(f"{a.local}/{a.prefixlen}" for a in link.addr_info if a.local and a.scope != "link")
        for link in _decode(tree, "ip -j address", ip.address, list[_Link])
    }
    default = {r.dev for r in _decode(tree, "ip -j route", ip.route, list[_Route]) if r.dst == "default"}
    found = []
    for name in tree.names(NET):
        here = f"{NET}/{name}"
        if not tree.exists(f"{here}/type"):
            continue  # bonding_masters is a file
        speed = tree.number(f"{here}/speed")
        found.append(
            Interface(
                name=name,
                kind=_kind(tree, here),
                state=_state(tree, here),
                addresses=addresses.get(name, ()),
                speed_gbit=speed / 1000 if speed else fabric_gbit.get(name),
                default_route=name in default,
                master=tree.target(f"{here}/master").rpartition("/")[2],
                numa_node=tree.number(f"{here}/device/numa_node"),
            )
        )
    return tuple(found)


def _decode(tree: Sysfs, command: str, text: str, kind: type[list[T]]) -> list[T]:
    if not text.strip():
        return []
    try:
        return schema.decode(text, kind)
    except msgspec.DecodeError as e:
        tree.unread.append(f"{command}: {e}")
        return []


def _state(tree: Sysfs, here: str) -> Literal["up", "down", "unknown"]:
    state = tree.text(f"{here}/operstate")
    if state == "unknown":  # of drivers that do not report it; the carrier tells
        return "up" if tree.number(f"{here}/carrier") else "unknown"
    return "up" if state == "up" else "down" if state else "unknown"


def _kind(tree: Sysfs, here: str) -> InterfaceKind:
    hardware, device = tree.number(f"{here}/type"), tree.target(here)
    if hardware == _LOOPBACK:
        return "loopback"
    if hardware == _INFINIBAND:
        return "infiniband"
    if tree.exists(f"{here}/bonding"):
        return "bond"
    if tree.exists(f"{here}/phy80211"):
        return "wireless"
    if "/virtual/" not in device:
        return "usb" if "/usb" in device else "ethernet"
    if "DEVTYPE=vlan" in tree.text(f"{here}/uevent"):
        return "vlan"
    ports = tree.names(f"{here}/brif")
    return "bridge" if any("/virtual/" not in tree.target(f"{NET}/{port}") for port in ports) else "virtual"

"""What a node is made of: network, RDMA devices, GPUs, processors. Read by ``node/``, kept in cluster profiles (TOML).

A field that cannot be told stays at its default: None, an empty string or "unknown", never a guess.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

# "virtual" has no device behind it: veth, a bridge of containers or virtual machines alone, a tunnel. "usb" is how the
# host sees its BMC.
InterfaceKind = Literal["ethernet", "infiniband", "bond", "bridge", "vlan", "virtual", "usb", "wireless", "loopback"]
LinkLayer = Literal["InfiniBand", "Ethernet", "unknown"]
MAX_CPUS = 8192  # CONFIG_NR_CPUS of Linux at most
PortState = Literal["active", "down", "unknown"]


class _Facts(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True
):
    """Without its defaults when written: TOML has no null."""


class Interface(_Facts, frozen=True):
    """A network interface. ``addresses`` carry their prefix (``10.0.0.7/16``), without link-local ones."""

    name: str
    kind: InterfaceKind = "ethernet"
    state: Literal["up", "down", "unknown"] = "unknown"
    addresses: tuple[str, ...] = ()
    speed_gbit: float | None = None
    default_route: bool = False
    master: str = ""  # the bond or bridge that it is a part of
    numa_node: int | None = None


class Hca(_Facts, frozen=True):
    """One port of an RDMA device (InfiniBand or RoCE). ``netdev``: its network interface."""

    name: str
    port: int = 1
    state: PortState = "unknown"
    link_layer: LinkLayer = "unknown"
    rate_gbit: float | None = None
    netdev: str = ""
    roce_v2_ipv4_gid_index: int | None = None  # the only such entry of its GID table; None where there are more
    pci_address: str = ""
    numa_node: int | None = None


class EfaDevice(_Facts, frozen=True):
    """An Elastic Fabric Adapter of AWS, spoken to through libfabric."""

    name: str
    state: PortState = "unknown"
    rate_gbit: float | None = None
    pci_address: str = ""
    numa_node: int | None = None


class Gpu(_Facts, frozen=True):
    """``nvlinks_active`` of ``nvlinks_total`` links are up; None where NVML cannot tell. ``nvlink_domain`` names the
    GPUs that reach each other over NVLink across nodes (cluster UUID and clique of NVML), empty where there is none."""

    index: int
    name: str = ""
    pci_address: str = ""
    numa_node: int | None = None
    nvlinks_active: int | None = None
    nvlinks_total: int | None = None
    nvswitch: bool | None = None
    nvlink_domain: str = ""


class NumaNode(_Facts, frozen=True):
    """``cpus`` as the kernel writes them: ``0-47,96-143``."""

    index: int
    cpus: str

    def __post_init__(self) -> None:
        parse_cpu_list(self.cpus)


class Cpus(_Facts, frozen=True):
    """``numa_nodes``: those with processors; GPU memory may form others."""

    sockets: int | None = None
    cores: int | None = None  # physical ones
    threads: int | None = None
    numa_nodes: tuple[NumaNode, ...] = ()


class NodeFacts(_Facts, frozen=True):
    """The table ``[node]`` of a cluster profile. Lists are in the order of their names' numbers."""

    interfaces: tuple[Interface, ...] = ()
    hcas: tuple[Hca, ...] = ()
    efa: tuple[EfaDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    cpus: Cpus = Cpus()
    libfabric: str = ""  # where the library was seen
    aws_ofi_nccl: str = ""  # where NCCL's plugin for libfabric was seen
    nccl_conf: tuple[
        str, ...
    ] = ()  # names that NCCL's own configuration files set; the environment would win over them
    unread: tuple[str, ...] = ()  # what could not be read, and why


def parse_cpu_list(cpus: str) -> set[int]:
    """``0-2,8`` as {0, 1, 2, 8}.

    Raises:
        ValueError: it is no such list, or has more processors than Linux knows.
    """
    numbers: set[int] = set()
    for item in cpus.split(",") if cpus.strip() else []:
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", item)
        if match is None or int(match[2] or match[1]) >= MAX_CPUS:
            raise ValueError(f"cpus = {cpus[:100]!r}: must be a list as 0-47,96-143, of numbers below {MAX_CPUS}")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers

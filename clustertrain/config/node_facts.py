"""Hardware of a node: network, RDMA devices, GPUs, processors. ``sysinfo`` reads it; cluster profiles (TOML) keep it.

An unknown field keeps its default (None, an empty string or "unknown"); it is never guessed.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

InterfaceKind = Literal["ethernet", "infiniband", "bond", "bridge", "vlan", "virtual", "usb", "wireless", "loopback"]
LinkLayer = Literal["InfiniBand", "Ethernet", "unknown"]
MAX_CPUS = 8192  # largest CONFIG_NR_CPUS of Linux
PortState = Literal["active", "down", "unknown"]


class _Facts(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True
):
    """Base that omits default values when encoded, since TOML has no null."""


class Interface(_Facts, frozen=True):
    """A network interface."""

    name: str
    """Name of the interface, for example ``"eth0"``."""
    kind: InterfaceKind = "ethernet"
    """Type. ``"virtual"``: not backed by a device, for example veth, a bridge of containers only, or a tunnel.
    ``"usb"``: usually the host's link to its BMC."""
    state: Literal["up", "down", "unknown"] = "unknown"
    """Operational state."""
    addresses: tuple[str, ...] = ()
    """IP addresses with prefix length (``10.0.0.7/16``), without link-local ones."""
    speed_gbit: float | None = None
    """Speed in Gbit/s. Unset: unknown."""
    default_route: bool = False
    """The default route uses this interface."""
    master: str = ""
    """Bond or bridge that contains this interface. Empty: none."""
    numa_node: int | None = None
    """NUMA node of the device. Unset: unknown."""


class Hca(_Facts, frozen=True):
    """One port of an RDMA device (InfiniBand or RoCE)."""

    name: str
    """Name of the device, for example ``"mlx5_0"``."""
    port: int = 1
    """Port number."""
    state: PortState = "unknown"
    """State of the port."""
    link_layer: LinkLayer = "unknown"
    """Link layer."""
    rate_gbit: float | None = None
    """Rate in Gbit/s. Unset: unknown."""
    netdev: str = ""
    """Network interface of the port. Empty: none."""
    roce_v2_ipv4_gid_index: int | None = None
    """Index of the only RoCE v2 IPv4 entry in the GID table. Unset: none or several."""
    pci_address: str = ""
    """PCI address. Empty: unknown."""
    numa_node: int | None = None
    """NUMA node of the device. Unset: unknown."""


class EfaDevice(_Facts, frozen=True):
    """An AWS Elastic Fabric Adapter, used through libfabric."""

    name: str
    """Name of the device."""
    state: PortState = "unknown"
    """State of the port."""
    rate_gbit: float | None = None
    """Rate in Gbit/s. Unset: unknown."""
    pci_address: str = ""
    """PCI address. Empty: unknown."""
    numa_node: int | None = None
    """NUMA node of the device. Unset: unknown."""


class Gpu(_Facts, frozen=True):
    """A GPU of the node."""

    index: int
    """Index of the GPU in NVML."""
    name: str = ""
    """The driver's name of the GPU. Empty: unknown."""
    pci_address: str = ""
    """PCI address. Empty: unknown."""
    numa_node: int | None = None
    """NUMA node of the device. Unset: unknown."""
    nvlinks_active: int | None = None
    """NVLinks that are up. Unset: NVML cannot report it."""
    nvlinks_total: int | None = None
    """NVLinks of the GPU. Unset: NVML cannot report it."""
    nvswitch: bool | None = None
    """The NVLinks lead to a switch. Unset: unknown."""
    nvlink_domain: str = ""
    """NVML's cluster UUID and clique; GPUs with the same value are connected by NVLink across nodes. Empty: none."""


class NumaNode(_Facts, frozen=True):
    """A NUMA node with processors."""

    index: int
    """Index of the NUMA node."""
    cpus: str
    """Its logical CPUs in the kernel's list format: ``0-47,96-143``."""

    def __post_init__(self) -> None:
        parse_cpu_list(self.cpus)


class Cpus(_Facts, frozen=True):
    """The processors of the node."""

    sockets: int | None = None
    """Number of sockets. Unset: unknown."""
    cores: int | None = None
    """Number of physical cores. Unset: unknown."""
    threads: int | None = None
    """Number of logical CPUs. Unset: unknown."""
    numa_nodes: tuple[NumaNode, ...] = ()
    """NUMA nodes with processors; GPU memory may form others."""


class NodeFacts(_Facts, frozen=True):
    """The ``[node]`` table of a cluster profile. Lists are sorted by the numbers in the devices' names."""

    interfaces: tuple[Interface, ...] = ()
    """Network interfaces."""
    hcas: tuple[Hca, ...] = ()
    """Ports of RDMA devices."""
    efa: tuple[EfaDevice, ...] = ()
    """Elastic Fabric Adapters."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs."""
    cpus: Cpus = Cpus()
    """Processors."""
    libfabric: str = ""
    """Path of the libfabric library. Empty: not found."""
    aws_ofi_nccl: str = ""
    """Path of NCCL's plugin for libfabric. Empty: not found."""
    nccl_conf: tuple[str, ...] = ()
    """Names of variables that NCCL's configuration files set and that the environment would override."""
    read_errors: tuple[str, ...] = ()
    """Facts that could not be read, with the reason."""


def parse_cpu_list(cpus: str) -> set[int]:
    """Return the numbers in a list of CPUs: ``0-2,8`` gives {0, 1, 2, 8}.

    Raises:
        ValueError: the list is malformed or has a number of ``MAX_CPUS`` or more.
    """
    numbers: set[int] = set()
    for item in cpus.split(",") if cpus.strip() else []:
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", item)
        if match is None or int(match[2] or match[1]) >= MAX_CPUS:
            raise ValueError(f"cpus = {cpus[:100]!r}: must be a list such as 0-47,96-143 of numbers below {MAX_CPUS}")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers

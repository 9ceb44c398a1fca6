"""Counters of this node's network interfaces, RDMA ports and disks, from the kernel's files under ``/sys``.

Stacked devices (bonds, bridges, VLANs, tunnels, software RAID, LVM, partitions) are left out so that no byte counts
twice. The kernel documents the files in Documentation/ABI (sysfs-class-net-statistics, sysfs-class-infiniband) and
Documentation/block/stat.rst.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from clustertrain import clock

_RESCAN_S = 60.0
_SECTOR_BYTES = 512  # unit of block/*/stat, whatever the disk's sector size
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count 32-bit words
_SATURATED_U32 = 0xFFFFFFFF  # counters of old hardware stop at this value
# The host's end of a virtual function or subfunction; the physical port counts its traffic too.
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


class NotAvailable(Exception):
    """A counter does not exist on this node; the message gives the reason."""


class DeviceClass(NamedTuple):
    """One class of devices and how to read it."""

    list_devices: Callable[[Path], list[str]]
    """Lists the folders of the devices to count, below a root."""
    read_counters: Callable[[str], tuple[int, int] | None]
    """Reads the two counters of a device folder; None if they are unusable."""
    none_reason: str
    """Reason given if there is no device."""
    unusable_reason: str = ""
    """Reason given if no device has usable counters."""


class DeviceCounters:
    """Sums of the counters over all devices of a class.

    Devices are listed once per minute and when one disappears: listing takes ten times as long as reading.
    """

    def __init__(self, device_class: DeviceClass, root: Path, now: Callable[[], float] = clock.monotonic) -> None:
        self._device_class, self._root, self._now = device_class, root, now
        self._devices: list[str] = []
        self._rescan_at = -math.inf

    def read(self) -> tuple[float, float]:
        """Return bytes received and sent, or read and written.

        Raises:
            NotAvailable: there are no usable devices.
            OSError, ValueError, IndexError: a device cannot be read.
        """
        if self._now() < self._rescan_at:
            try:
                return self._read_sums()
            except (OSError, ValueError, IndexError):
                pass  # a device may have disappeared
        self._devices = self._device_class.list_devices(self._root)
        self._rescan_at = self._now() + _RESCAN_S
        return self._read_sums()

    def _read_sums(self) -> tuple[float, float]:
        if not self._devices:
            raise NotAvailable(self._device_class.none_reason)
        pairs = [pair for pair in map(self._device_class.read_counters, self._devices) if pair is not None]
        if not pairs:
            raise NotAvailable(self._device_class.unusable_reason)
        return float(sum(a for a, _ in pairs)), float(sum(b for _, b in pairs))


def _list_interfaces(root: Path) -> list[str]:
    """List the interfaces of hardware; if there are none (in a container), the ones not stacked on others."""
    folder = root / "sys/class/net"
    names = [n for n in _list_dir(folder) if (folder / n / "statistics").is_dir() and n != "lo"]
    chosen = [n for n in names if _is_port(folder / n)] or [n for n in names if _is_unstacked(folder / n)]
    return [f"{folder}/{n}/statistics" for n in chosen]


def _read_interface(folder: str) -> tuple[int, int]:
    return int(_read_bytes(f"{folder}/rx_bytes")), int(_read_bytes(f"{folder}/tx_bytes"))


def _is_port(interface: Path) -> bool:
    if not (interface / "device").exists():
        return False
    if (interface / "master/device").exists():  # a cloud's fast path, already counted by the interface above it
        return False
    return not _REPRESENTOR.fullmatch(_read_text(interface / "phys_port_name"))


def _is_unstacked(interface: Path) -> bool:
    stacked = any(n.startswith("lower_") for n in _list_dir(interface))
    return not stacked and not (interface / "bridge").is_dir() and not (interface / "master").exists()


def _list_ports(root: Path) -> list[str]:
    folder = root / "sys/class/infiniband"
    return [str(port) for device in _list_dir(folder) for port in sorted((folder / device).glob("ports/*"))]


def _read_port(port: str) -> tuple[int, int] | None:
    # counters_ext: mlx4 before Linux 4.5; hw_counters: EFA, in bytes.
    for folder, received, sent, scale in (
        ("counters_ext", "port_rcv_data_64", "port_xmit_data_64", _WORD_BYTES),
        ("counters", "port_rcv_data", "port_xmit_data", _WORD_BYTES),
        ("hw_counters", "rx_bytes", "tx_bytes", 1),
    ):
        try:
            values = int(_read_bytes(f"{port}/{folder}/{received}")), int(_read_bytes(f"{port}/{folder}/{sent}"))
        except (OSError, ValueError):  # the kernel may write "N/A (no PMA)"
            continue
        if _SATURATED_U32 not in values:
            return values[0] * scale, values[1] * scale
    return None


def _list_disks(root: Path) -> list[str]:
    folder = root / "sys/block"
    return [
        f"{folder}/{n}"
        for n in _list_dir(folder)
        if (folder / n / "device").exists() and _read_text(folder / n / "hidden") != "1"
    ]


def _read_disk(folder: str) -> tuple[int, int]:
    stat = _read_bytes(f"{folder}/stat").split()
    return _SECTOR_BYTES * int(stat[2]), _SECTOR_BYTES * int(stat[6])


NETWORK = DeviceClass(_list_interfaces, _read_interface, "this node has no network interface except the loopback")
# InfiniBand, RoCE, EFA.
INFINIBAND = DeviceClass(
    _list_ports, _read_port, "this node has no RDMA device", "no RDMA port of this node has 64-bit counters"
)
DISKS = DeviceClass(_list_disks, _read_disk, "this node has no local disk")


def _read_bytes(path: str) -> bytes:
    """Read a short kernel file. Path and buffered files would take ten times as long."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _list_dir(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError:
        return []


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

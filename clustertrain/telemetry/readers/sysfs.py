"""Counters of this node's network interfaces, RDMA ports and disks, from the kernel's files under ``/sys``.

What is stacked on something else is left out, so that no byte counts twice: bonds, bridges, VLANs, tunnels, software
RAID, LVM, partitions. Files and their meaning: the kernel's Documentation/ABI (sysfs-class-net-statistics,
sysfs-class-infiniband) and Documentation/block/stat.rst.
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
_SECTOR_BYTES = 512  # in block/*/stat, whatever the disk's own is
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count words of 32 bits
_SATURATED_U32 = 0xFFFFFFFF  # where a counter of old hardware stays once it is there
# The host's end of a virtual function or subfunction: its traffic passes the physical port too.
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


class NotAvailable(Exception):
    """There is nothing to read; the message says why."""


class DeviceClass(NamedTuple):
    """A kind of devices: ``list_devices(root)`` lists the folders of those that count, ``read_counters(folder)`` gives
    two counters of one, None where it has none that can be used."""

    list_devices: Callable[[Path], list[str]]
    read_counters: Callable[[str], tuple[int, int] | None]
    none_reason: str  # why there is no figure where none is chosen
    unusable_reason: str = ""  # and where none of the chosen can be used


class DeviceCounters:
    """The sums over all devices of a kind.

    Which devices count is looked up once a minute, and when one is gone: that takes ten times as long as to read them.
    """

    def __init__(self, device_class: DeviceClass, root: Path, now: Callable[[], float] = clock.monotonic) -> None:
        self._device_class, self._root, self._now = device_class, root, now
        self._devices: list[str] = []
        self._rescan_at = -math.inf

    def read(self) -> tuple[float, float]:
        """Bytes received and sent, or read and written.

        Raises:
            Missing: there is nothing to read.
            OSError, ValueError, IndexError: what there is cannot be read.
        """
        if self._now() < self._rescan_at:
            try:
                return self._read_sums()
            except (OSError, ValueError, IndexError):
                pass  # one of them may be gone
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
    """Those that belong to hardware; where there is none (a container with a virtual one), those at the bottom."""
    folder = root / "sys/class/net"
    names = [n for n in _list_dir(folder) if (folder / n / "statistics").is_dir() and n != "lo"]
    chosen = [n for n in names if _is_port(folder / n)] or [n for n in names if _is_unstacked(folder / n)]
    return [f"{folder}/{n}/statistics" for n in chosen]


def _read_interface(folder: str) -> tuple[int, int]:
    return int(_read_bytes(f"{folder}/rx_bytes")), int(_read_bytes(f"{folder}/tx_bytes"))


def _is_port(interface: Path) -> bool:
    if not (interface / "device").exists():
        return False
    if (interface / "master/device").exists():  # a cloud's fast path below an interface that counts it already
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
        except (OSError, ValueError):  # "N/A (no PMA)" is one of the answers
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


NETWORK = DeviceClass(_list_interfaces, _read_interface, "this node has no network interface but the loopback")
# InfiniBand, RoCE, EFA.
INFINIBAND = DeviceClass(
    _list_ports, _read_port, "this node has no RDMA device", "no RDMA port of this node has counters of 64 bits"
)
DISKS = DeviceClass(_list_disks, _read_disk, "this node has no disk of its own")


def _read_bytes(path: str) -> bytes:
    """Of a file of the kernel's, which are short. Without a Path and without buffers, which take ten times as long."""
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

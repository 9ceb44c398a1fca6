"""Counters of this node's network interfaces, RDMA ports and disks, from the kernel's files under ``/sys``.

What is stacked on something else is left out, so that no byte counts twice: bonds, bridges, VLANs, tunnels, software
RAID, LVM, partitions. Files and their meaning: the kernel's Documentation/ABI (sysfs-class-net-statistics,
sysfs-class-infiniband) and Documentation/block/stat.rst.
"""

from __future__ import annotations

import re
from pathlib import Path

_SECTOR = 512  # in block/*/stat, whatever the disk's own is
_WORD = 4  # port_rcv_data and port_xmit_data count words of 32 bits
_FULL_U32 = 0xFFFFFFFF  # where a counter of old hardware stays once it is there
# The host's end of a virtual function or subfunction: its traffic passes the physical port too.
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


class Missing(Exception):
    """There is nothing to read; the message says why."""


def network(root: Path) -> tuple[float, float]:
    """Bytes received and sent by the interfaces that belong to hardware; where there is none (a container with a
    virtual one), by those that lie at the bottom.

    Raises:
        Missing: there is no interface but the loopback.
    """
    folder = root / "sys/class/net"
    names = [n for n in _names(folder) if (folder / n / "statistics").is_dir() and n != "lo"]
    chosen = [n for n in names if _is_port(folder / n)] or [n for n in names if _is_bottom(folder / n)]
    if not chosen:
        raise Missing(f"{folder} lists no interface but the loopback")
    received = sum(_number(folder / n / "statistics/rx_bytes") for n in chosen)
    sent = sum(_number(folder / n / "statistics/tx_bytes") for n in chosen)
    return float(received), float(sent)


def _is_port(interface: Path) -> bool:
    if not (interface / "device").exists():
        return False
    if (interface / "master/device").exists():  # a cloud's fast path below an interface that counts it already
        return False
    return not _REPRESENTOR.fullmatch(_text(interface / "phys_port_name"))


def _is_bottom(interface: Path) -> bool:
    stacked = any(n.startswith("lower_") for n in _names(interface))
    return not stacked and not (interface / "bridge").is_dir() and not (interface / "master").exists()


def infiniband(root: Path) -> tuple[float, float]:
    """Bytes received and sent by all ports of RDMA devices: InfiniBand, RoCE, EFA.

    Raises:
        Missing: there is none, or none that counts without overflowing.
    """
    folder = root / "sys/class/infiniband"
    ports = [port for device in _names(folder) for port in sorted((folder / device).glob("ports/*"))]
    if not ports:
        raise Missing("this node has no RDMA device")
    counted = [c for c in map(_port, ports) if c is not None]
    if not counted:
        raise Missing("no RDMA port of this node has counters of 64 bits")
    return float(sum(r for r, _ in counted)), float(sum(s for _, s in counted))


def _port(port: Path) -> tuple[int, int] | None:
    # counters_ext: mlx4 before Linux 4.5; hw_counters: EFA, in bytes.
    for folder, received, sent, scale in (
        ("counters_ext", "port_rcv_data_64", "port_xmit_data_64", _WORD),
        ("counters", "port_rcv_data", "port_xmit_data", _WORD),
        ("hw_counters", "rx_bytes", "tx_bytes", 1),
    ):
        try:
            values = _number(port / folder / received), _number(port / folder / sent)
        except (OSError, ValueError):  # "N/A (no PMA)" is one of the answers
            continue
        if _FULL_U32 not in values:
            return values[0] * scale, values[1] * scale
    return None


def disks(root: Path) -> tuple[float, float]:
    """Bytes read from and written to this node's own disks.

    Raises:
        Missing: it has none.
    """
    folder = root / "sys/block"
    whole = [n for n in _names(folder) if (folder / n / "device").exists() and _text(folder / n / "hidden") != "1"]
    if not whole:
        raise Missing("this node has no disk of its own")
    stats = [(folder / n / "stat").read_text().split() for n in whole]
    return float(_SECTOR * sum(int(s[2]) for s in stats)), float(_SECTOR * sum(int(s[6]) for s in stats))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    return int(path.read_text())

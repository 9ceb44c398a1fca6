"""Ports and network interfaces of this host, for the rendezvous."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import psutil

from clustertrain.errors import ClusterTrainError

MIN_PORT = 10_000
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL_RANGE = (32_768, 60_999)


def ephemeral_range() -> tuple[int, int]:
    """Return the ports for outgoing connections; a listener on one may get "address in use" by chance."""
    try:
        low, high = _RANGE_FILE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL_RANGE


def find_free_port(attempts: int = 200) -> int:
    """Return a port outside the ephemeral range that is free now on every interface.

    Raises:
        ClusterTrainError: none of ``attempts`` random ports was free.
    """
    low, high = ephemeral_range()
    candidates = [p for p in range(MIN_PORT, 65_536) if not low <= p <= high]
    if not candidates:
        raise ClusterTrainError(f"the ephemeral range {low}-{high} leaves no port for the rendezvous")
    family = _address_family()
    for port in random.SystemRandom().sample(candidates, min(attempts, len(candidates))):
        if _can_bind(family, port):
            return port
    raise ClusterTrainError(f"no free port in {attempts} tries between {MIN_PORT} and 65535 on {socket.gethostname()}")


def _address_family() -> socket.AddressFamily:
    """Return IPv6, which covers IPv4 too, or IPv4 if the kernel has IPv6 disabled (ipv6.disable=1)."""
    return socket.AF_INET6 if _can_bind(socket.AF_INET6, 0) else socket.AF_INET


def _can_bind(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.bind(("", port))
    except OSError:
        return False
    return True


def find_interface_to(address: str) -> str | None:
    """Return the network interface that this node uses to reach ``address``; None if unknown."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((address, 9))  # a datagram socket: picks the route, sends nothing
            local_address = s.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.split("%")[0] == local_address for a in addresses):
            return name
    return None

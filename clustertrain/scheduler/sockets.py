"""Ports and interfaces of this host, for processes that are about to meet."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import psutil

from clustertrain.errors import ClusterTrainError

LOWEST_PORT = 10_000
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range() -> tuple[int, int]:
    """The ports that the kernel hands to outgoing connections; a listener there meets "address in use" by chance."""
    try:
        low, high = _RANGE_FILE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL


def free_port(attempts: int = 200) -> int:
    """A port that is free now on every interface and outside the ephemeral range.

    Raises:
        ClusterTrainError: none of ``attempts`` random ports was free.
    """
    low, high = ephemeral_range()
    candidates = [p for p in range(LOWEST_PORT, 65_536) if not low <= p <= high]
    if not candidates:
        raise ClusterTrainError(f"the ephemeral range {low}-{high} leaves no port for the rendezvous")
    family = _family()
    for port in random.SystemRandom().sample(candidates, min(attempts, len(candidates))):
        if _binds(family, port):
            return port
    raise ClusterTrainError(
        f"no free port in {attempts} tries between {LOWEST_PORT} and 65535 on {socket.gethostname()}"
    )


def _family() -> socket.AddressFamily:
    """IPv6 covers both; a kernel started with ipv6.disable=1 has none, whatever Python was built with."""
    return socket.AF_INET6 if _binds(socket.AF_INET6, 0) else socket.AF_INET


def _binds(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.bind(("", port))
    except OSError:
        return False
    return True


def interface_towards(address: str) -> str | None:
    """The network interface that this node uses to reach ``address``, or None when it can't be told."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((address, 9))  # a datagram socket: picks the route, sends nothing
            local = s.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.split("%")[0] == local for a in addresses):
            return name
    return None

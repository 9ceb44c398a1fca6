"""Where the ranks of all nodes meet: the first node probes a free port and publishes it, the others read it."""

from __future__ import annotations

import random
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from clustertrain import clock, fsio
from clustertrain.errors import ClusterTrainError, EnvironmentNotFit

LOWEST_PORT = 10_000
RESOLVE_TIMEOUT_S = 30.0
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = (32_768, 60_999)


@dataclass(frozen=True)
class Rendezvous:
    """``id`` is fresh for every attempt, so a straggler of an earlier one can never join."""

    host: str
    port: int
    id: str


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


def publish(path: Path, host: str) -> Rendezvous:
    """Called on the first node."""
    meeting = Rendezvous(host=host, port=free_port(), id=secrets.token_hex(8))
    fsio.write_json(path, asdict(meeting))
    return meeting


def wait_for(path: Path, node: str, timeout_s: float) -> Rendezvous:
    """Called on the other nodes.

    Raises:
        ClusterTrainError: the first node published nothing in time.
    """
    # Listing the folder makes an NFS client drop its cached "no such file".
    found = clock.wait_until(lambda: path.name in {p.name for p in path.parent.iterdir()}, timeout_s, 0.2)
    value = fsio.read_json(path) if found else None
    if value is None:
        raise ClusterTrainError(f"{node}: the first node published no rendezvous in {timeout_s:g} s ({path})")
    return Rendezvous(**value)


def resolve(meeting: Rendezvous, node: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> str:
    """The rendezvous host's address as this node sees it. A name server that fails for a moment is asked again.

    Raises:
        EnvironmentNotFit: the name does not resolve here. Without this check the ranks would hang instead.
    """
    found: list[str] = []
    failures: list[OSError] = []

    def asked() -> bool:
        try:
            found.append(str(socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as e:
            failures.append(e)
        return bool(found)

    if clock.wait_until(asked, timeout_s, 1.0):
        return found[0]
    raise EnvironmentNotFit(
        f"node {node} cannot resolve the rendezvous host {meeting.host!r}: {failures[-1]}",
        fix="make the nodes' names resolvable from each other (DNS or /etc/hosts)",
    ) from failures[-1]


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

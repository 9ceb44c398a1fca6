"""The rendezvous of the ranks of all nodes: the first node finds a free port and publishes it for the others."""

from __future__ import annotations

import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from clustertrain import clock, fsio
from clustertrain.errors import ClusterTrainError, UnsuitableEnvironment
from clustertrain.scheduler.sockets import find_free_port

RESOLVE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Rendezvous:
    """An address for torchrun. ``id`` is new for each attempt, so that processes of earlier ones cannot join."""

    host: str
    port: int
    id: str


def publish(path: Path, host: str) -> Rendezvous:
    """Choose a port and write the rendezvous to ``path``, on the first node."""
    rdzv = Rendezvous(host=host, port=find_free_port(), id=secrets.token_hex(8))
    fsio.write_json(path, asdict(rdzv))
    return rdzv


def wait_for(path: Path, node: str, timeout_s: float) -> Rendezvous:
    """Wait for the rendezvous of the first node, on the others.

    Raises:
        ClusterTrainError: the first node did not publish it in time.
    """
    # Listing the folder makes an NFS client drop its cached "no such file".
    is_published = clock.wait_until(lambda: path.name in {p.name for p in path.parent.iterdir()}, timeout_s, 0.2)
    value = fsio.read_json(path) if is_published else None
    if value is None:
        raise ClusterTrainError(f"{node}: the first node published no rendezvous in {timeout_s:g} s ({path})")
    return Rendezvous(**value)


def resolve(rdzv: Rendezvous, node: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> str:
    """Return the address of the rendezvous host on this node, with retries if the name server fails temporarily.

    Raises:
        UnsuitableEnvironment: the name does not resolve. Without this check the ranks would hang.
    """
    addresses: list[str] = []
    failures: list[OSError] = []

    def try_resolve() -> bool:
        try:
            addresses.append(str(socket.getaddrinfo(rdzv.host, rdzv.port, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as e:
            failures.append(e)
        return bool(addresses)

    if clock.wait_until(try_resolve, timeout_s, 1.0):
        return addresses[0]
    raise UnsuitableEnvironment(
        f"node {node} cannot resolve the rendezvous host {rdzv.host!r}: {failures[-1]}",
        fix="make the node names resolvable on every node (DNS or /etc/hosts)",
    ) from failures[-1]

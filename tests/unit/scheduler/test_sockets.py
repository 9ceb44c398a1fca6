"""Free ports, and the network interface of a route."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from clustertrain.errors import ClusterTrainError
from clustertrain.scheduler import sockets


def test_port_is_free_and_outside_the_ephemeral_range() -> None:
    low, high = sockets.ephemeral_range()
    for _ in range(20):
        port = sockets.find_free_port()
        assert not low <= port <= high
        with socket.socket() as s:
            s.bind(("", port))


def test_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    free = sockets.find_free_port()
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as occupied:
        occupied.bind(("", 0))
        busy = occupied.getsockname()[1]

        class InOrder:
            def sample(self, _candidates: list[int], _k: int) -> list[int]:
                return [busy, free]

        monkeypatch.setattr(sockets.random, "SystemRandom", InOrder)
        assert sockets.find_free_port() == free


def test_ephemeral_range_that_leaves_no_port_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ephemeral_range", lambda: (1024, 65535))
    with pytest.raises(ClusterTrainError, match="leaves no port"):
        sockets.find_free_port()


def test_free_port_is_found_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoIpv6(socket.socket):
        def __init__(self, family: int = -1, *args: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args)

    monkeypatch.setattr(sockets.socket, "socket", NoIpv6)
    assert sockets.find_free_port() >= sockets.MIN_PORT
    assert sockets.find_interface_to("::1") is None


def test_interface_to_localhost_is_lo() -> None:
    assert sockets.find_interface_to("127.0.0.1") == "lo"

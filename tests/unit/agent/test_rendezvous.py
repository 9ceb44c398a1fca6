"""Where the ranks meet."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.agent import rendezvous
from clustertrain.errors import ClusterTrainError, EnvironmentNotFit


def test_the_port_is_free_and_outside_the_ephemeral_range() -> None:
    low, high = rendezvous.ephemeral_range()
    for _ in range(20):
        port = rendezvous.free_port()
        assert not low <= port <= high
        with socket.socket() as s:
            s.bind(("", port))


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = rendezvous.free_port()
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as taken:
        taken.bind(("", 0))
        busy = taken.getsockname()[1]

        class InOrder:
            def sample(self, _candidates: list[int], _k: int) -> list[int]:
                return [busy, free]

        monkeypatch.setattr(rendezvous.random, "SystemRandom", InOrder)
        assert rendezvous.free_port() == free


def test_an_ephemeral_range_that_leaves_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ephemeral_range", lambda: (1024, 65535))
    with pytest.raises(ClusterTrainError, match="leaves no port"):
        rendezvous.free_port()


def test_each_attempt_has_an_id_of_its_own(tmp_path: Path) -> None:
    one, two = (rendezvous.publish(tmp_path / n, "h") for n in ("a", "b"))
    assert one.id != two.id
    assert rendezvous.wait_for(tmp_path / "a", "n2", 5.0) == one


def test_a_first_node_that_publishes_nothing_is_named_late_but_clearly(tmp_path: Path) -> None:
    with pytest.raises(ClusterTrainError, match="n2: the first node published no rendezvous"):
        rendezvous.wait_for(tmp_path / "a", "n2", 0.0)


def test_a_name_that_does_not_resolve_fails_loudly() -> None:
    meeting = rendezvous.Rendezvous("no-such-host.invalid", 12345, "x")
    with pytest.raises(EnvironmentNotFit, match=r"node n2 cannot resolve .*no-such-host"):
        rendezvous.resolve(meeting, "n2", timeout_s=0.0)


def test_a_name_server_that_fails_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = socket.getaddrinfo, []

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        if len(asked) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return ask(*args, **kwargs)

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", fails_once)
    monkeypatch.setattr(clock.time, "sleep", lambda _s: None)
    assert rendezvous.resolve(rendezvous.Rendezvous("127.0.0.1", 12345, "x"), "n2") == "127.0.0.1"
    assert len(asked) == 2


def test_a_kernel_without_ipv6_has_ports_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoIpv6(socket.socket):
        def __init__(self, family: int = -1, *args: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args)

    monkeypatch.setattr(rendezvous.socket, "socket", NoIpv6)
    assert rendezvous.free_port() >= rendezvous.LOWEST_PORT
    assert rendezvous.interface_towards("::1") is None


def test_the_loopback_interface_leads_to_loopback() -> None:
    assert rendezvous.interface_towards("127.0.0.1") == "lo"

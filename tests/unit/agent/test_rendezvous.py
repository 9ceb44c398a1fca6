"""Where the ranks meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

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
        rendezvous.resolve(meeting, "n2")


def test_the_loopback_interface_leads_to_loopback() -> None:
    assert rendezvous.interface_towards("127.0.0.1") == "lo"

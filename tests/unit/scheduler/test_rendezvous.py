"""Where the ranks meet."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.errors import ClusterTrainError, UnsuitableEnvironment
from clustertrain.scheduler import rendezvous


def test_each_attempt_has_an_id_of_its_own(tmp_path: Path) -> None:
    one, two = (rendezvous.publish(tmp_path / n, "h") for n in ("a", "b"))
    assert one.id != two.id
    assert rendezvous.wait_for(tmp_path / "a", "n2", 5.0) == one


def test_a_first_node_that_publishes_nothing_is_named_late_but_clearly(tmp_path: Path) -> None:
    with pytest.raises(ClusterTrainError, match="n2: the first node published no rendezvous"):
        rendezvous.wait_for(tmp_path / "a", "n2", 0.0)


def test_a_name_that_does_not_resolve_fails_loudly() -> None:
    meeting = rendezvous.Rendezvous("no-such-host.invalid", 12345, "x")
    with pytest.raises(UnsuitableEnvironment, match=r"node n2 cannot resolve .*no-such-host"):
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

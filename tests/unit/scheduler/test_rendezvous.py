"""The rendezvous of the ranks."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.errors import ClusterTrainError, UnsuitableEnvironment
from clustertrain.scheduler import rendezvous


def test_each_attempt_has_its_own_id(tmp_path: Path) -> None:
    first, second = (rendezvous.publish(tmp_path / n, "h") for n in ("a", "b"))
    assert first.id != second.id
    assert rendezvous.wait_for(tmp_path / "a", "n2", 5.0) == first


def test_missing_rendezvous_names_the_first_node(tmp_path: Path) -> None:
    with pytest.raises(ClusterTrainError, match="n2: the first node published no rendezvous"):
        rendezvous.wait_for(tmp_path / "a", "n2", 0.0)


def test_host_name_that_does_not_resolve_raises() -> None:
    unresolvable = rendezvous.Rendezvous("no-such-host.invalid", 12345, "x")
    with pytest.raises(UnsuitableEnvironment, match=r"node n2 cannot resolve .*no-such-host"):
        rendezvous.resolve(unresolvable, "n2", timeout_s=0.0)


def test_temporary_failure_of_the_name_server_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    real_getaddrinfo, calls = socket.getaddrinfo, []

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real_getaddrinfo(*args, **kwargs)

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", fails_once)
    monkeypatch.setattr(clock.time, "sleep", lambda _s: None)
    assert rendezvous.resolve(rendezvous.Rendezvous("127.0.0.1", 12345, "x"), "n2") == "127.0.0.1"
    assert len(calls) == 2

"""The command `clustertrain ui`, without serving."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustertrain import settings
from clustertrain.cli.ui import ui
from clustertrain.errors import NotFound, UsageError
from clustertrain.ui import server


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the servers that were started: home and port."""
    started: list[tuple[str, int]] = []

    def serve(listener: socket.socket, token: str) -> None:
        assert len(token) >= 32
        started.append((os.environ[settings.HOME], listener.getsockname()[1]))
        assert listener.getsockname()[0] == "127.0.0.1"
        listener.close()

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setenv(settings.HOME, "unused")  # the command sets it, and the fixture restores it
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return started


@pytest.fixture
def taken() -> Iterator[int]:
    """Return a port that is in use."""
    listener = server.bind(None)
    port: int = listener.getsockname()[1]
    yield port
    listener.close()


def test_it_prints_the_address_and_the_line_for_ssh(tmp_path: Path, served: list[tuple[str, int]]) -> None:
    result = CliRunner().invoke(ui, ["--home", str(tmp_path)], catch_exceptions=False)
    ((home, port),) = served
    lines = result.output.splitlines()
    assert home == str(tmp_path) and result.exit_code == 0
    assert lines[0].startswith(f"http://127.0.0.1:{port}/?token=") and f"ssh -L {port}:127.0.0.1:{port} " in lines[-1]


def test_a_port_in_use(taken: int, served: list[tuple[str, int]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--port {taken}: Address already in use") as caught:
        CliRunner().invoke(ui, ["--port", str(taken)], catch_exceptions=False)
    assert "leave out --port" in str(caught.value) and served == []
    CliRunner().invoke(ui, ["--home", str(tmp_path)], catch_exceptions=False)
    assert served[0][1] > taken, "without --port, the next free one"


def test_no_port_is_free(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setattr(server, "DEFAULT_PORT", taken)
    monkeypatch.setattr(server, "TRIED_PORTS", 1)
    with pytest.raises(UsageError, match="in use"):
        server.bind(None)


@pytest.mark.parametrize(("home", "words"), [("nothing", "no such folder"), ("a/runs", "a folder of runs, not a home")])
def test_a_folder_that_is_no_home(tmp_path: Path, home: str, words: str, served: list[tuple[str, int]]) -> None:
    (tmp_path / "a" / "runs" / "lm-abcdef").mkdir(parents=True)
    with pytest.raises(NotFound, match=words):
        CliRunner().invoke(ui, ["--home", str(tmp_path / home)], catch_exceptions=False)
    assert served == []

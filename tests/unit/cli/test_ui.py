"""The command `clustertrain ui`, without serving."""

from __future__ import annotations

import os
import signal
import socket
import urllib.parse
import urllib.request
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
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


@pytest.mark.parametrize(
    ("home", "words"),
    [("{}/nothing", "no such folder"), ("{}/a/runs", "a folder of runs, not a home"), ("", "no such folder")],
)
def test_a_folder_that_is_no_home(tmp_path: Path, home: str, words: str, served: list[tuple[str, int]]) -> None:
    (tmp_path / "a" / "runs" / "lm-abcdef").mkdir(parents=True)
    with pytest.raises(NotFound, match=words):
        CliRunner().invoke(ui, ["--home", home.format(tmp_path)], catch_exceptions=False)
    assert served == []


def test_a_browser_gets_no_token_in_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[tuple[str, int]]
) -> None:
    pages: list[Path] = []

    def open_browser(address: str) -> bool:
        pages.append(Path(urllib.request.url2pathname(urllib.parse.urlsplit(address).path)))
        assert address.startswith("file://") and pages[0].stat().st_mode & 0o077 == 0
        assert "?token=" in pages[0].read_text() and "http" not in address
        return True

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv(settings.XDG_CACHE_HOME, str(tmp_path / "cache"))
    monkeypatch.setattr(webbrowser, "open", open_browser)
    result = CliRunner().invoke(ui, ["--home", str(tmp_path)], catch_exceptions=False)
    assert len(pages) == len(served) == 1 and not pages[0].exists() and "ssh -L" not in result.output
    (tmp_path / "cache" / "clustertrain" / "ui").rmdir()
    (tmp_path / "cache" / "clustertrain" / "ui").touch()
    result = CliRunner().invoke(ui, ["--home", str(tmp_path)], catch_exceptions=False)
    assert len(served) == 2 and "ssh -L" in result.output, "no folder for the page"


def test_a_closed_terminal_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(started: uvicorn.Server, sockets: list[socket.socket]) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        assert started.should_exit
        sockets[0].close()

    monkeypatch.setenv(settings.HOME, str(tmp_path))
    monkeypatch.setattr(uvicorn.Server, "run", run)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        server.serve(server.bind(None), server.make_token())
    finally:
        signal.signal(signal.SIGHUP, before)

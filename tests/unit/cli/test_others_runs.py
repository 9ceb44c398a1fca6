"""Another user's view of runs that they may not read, or only in part."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clustertrain import fsio
from clustertrain.cli.jobs import list_, status
from clustertrain.cli.logs import logs
from clustertrain.cli.telemetry import telemetry
from clustertrain.cli.top import top
from clustertrain.errors import PermissionDenied
from clustertrain.run import lookup
from clustertrain.run.run_dir import RunDir
from tests.unit.report.live_runs import begin, new_run

pytestmark = pytest.mark.long


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder that every user can reach, unlike pytest's. It has an open run and a newer private one."""
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(folder))
    now = time.time()
    for name in ("open-abc234", "private-abc234"):
        run = new_run(folder, now, name=name, submitted=600.0)
        begin(run, now - 300, ["a"], steps=20)
        log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
        log.append({"t": now - 290, "event": "ended", "ending": "completed", "last_step": 20})
        log.close()
        run.attempt(1).logs.mkdir()
        run.attempt(1).rank_log(0).write_text("hello\n")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    os.utime(folder / "runs" / "private-abc234" / "spec.toml", (now + 9, now + 9))
    # Import the late imports now: the user nobody may have no access to this Python.
    for command, more in COMMANDS.values():
        CliRunner().invoke(command, ["private-abc234", *more])
    CliRunner().invoke(list_, [])
    (folder / "runs" / "private-abc234").chmod(0o700)
    yield folder
    shutil.rmtree(folder)


def open_run(home: Path) -> RunDir:
    return RunDir(home / "runs" / "open-abc234")


COMMANDS = {"status": (status, []), "telemetry": (telemetry, []), "top": (top, ["--once"]), "logs": (logs, [])}


def call(command: str, *argv: str) -> Result:
    click_command, more = COMMANDS[command]
    with as_nobody():
        return CliRunner().invoke(click_command, [*argv, *more])


@pytest.mark.parametrize("name", ["open", "latest", "open-abc234"])
@pytest.mark.parametrize("command", COMMANDS)
def test_private_run_does_not_hide_an_open_one(home: Path, command: str, name: str) -> None:
    done = call(command, name)
    assert done.exception is None or done.exit_code == 0
    assert "hello" in done.stdout if command == "logs" else "open-abc234" in done.stdout


def test_job_id_is_resolved_among_readable_runs(home: Path) -> None:
    with as_nobody():
        assert lookup.resolve_run("local-1").id == "open-abc234"


def test_list_omits_private_runs(home: Path) -> None:
    with as_nobody():
        done = CliRunner().invoke(list_, ["--json"])
    assert [(row["run"], row["state"]) for row in json.loads(done.stdout)["runs"]] == [("open-abc234", "completed")]


@pytest.mark.parametrize("name", ["private", "private-abc234"])
@pytest.mark.parametrize("command", COMMANDS)
def test_private_run_is_reported_with_its_owner(home: Path, command: str, name: str) -> None:
    error = call(command, name).exception
    assert isinstance(error, PermissionDenied)
    assert "private-abc234: you may not read it; it belongs to root" in error.message
    assert "--share" in str(error.fix)


@pytest.mark.parametrize("denied", ["attempts", "attempts/1", "attempts/1/events", "events", "spec.toml"])
@pytest.mark.parametrize("command", ["status", "top"])
def test_unreadable_part_of_an_open_run_is_named(home: Path, command: str, denied: str) -> None:
    path = open_run(home).path / denied
    path.chmod(0)
    error = call(command, "open").exception
    assert isinstance(error, PermissionDenied)
    assert f"runs/open-abc234/{denied}" in error.message and "belongs to root" in error.message
    with as_nobody():
        text = " ".join(CliRunner().invoke(list_, []).stdout.split())
    assert "you may not read it" in text and "PermissionError" not in text


def test_unreadable_home_is_named(home: Path) -> None:
    (home / "runs").chmod(0o700)
    error = call("status", "latest").exception
    assert isinstance(error, PermissionDenied) and f"{home / 'runs'}: you may not read it" in error.message

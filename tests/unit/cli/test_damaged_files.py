"""A run's files that are truncated, empty, or JSON and TOML of another shape: the commands that read a run report them
or continue without them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from clustertrain import fsio
from clustertrain.cli.checkpoint import list_ as checkpoints
from clustertrain.cli.compare import compare
from clustertrain.cli.jobs import list_, status, wait
from clustertrain.cli.logs import logs
from clustertrain.cli.telemetry import telemetry
from clustertrain.cli.top import top
from clustertrain.errors import ClusterTrainError
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from tests.unit.report.live_runs import begin, new_run

pytestmark = pytest.mark.long

JSON = {
    "empty": b"",
    "cut off": b'{"job_id": "local-1", "nod',
    "a list": b"[1, 2]",
    "a string": b'"words"',
    "a number": b"7",
    "null": b"null",
    "nulls": b'{"job_id": null, "restart": null, "nodes": null, "host": null, "t": null, "layout": null, "batch": null,'
    b'"time": null, "memory": null, "world_size": null, "ranks": null, "end_time": null, "signal_lead_s": null}',
    "other kinds": b'{"job_id": [], "restart": "x", "nodes": 7, "host": {}, "t": "x", "layout": [1], "batch": "x",'
    b'"time": 3, "memory": [], "world_size": {}, "ranks": [7, null], "end_time": "x", "signal_lead_s": "x"}',
    "not UTF-8": b'{"job_id": "\xff\xfe"}',
    "zeros": b"\0" * 64,
    "deep": b"[" * 100_000,
}
TOML = {
    "empty": b"",
    "cut off": b'[job]\nbackend = "loc',
    "a list": b"[1, 2]",
    "other kinds": b"job = 7\nrecipe = []\n",
    "a number": b"[job]\nbackend = 7\n",
    "unknown": b"nonsense = 1\n",
    "not UTF-8": b'[job]\nname = "\xff\xfe"\n',
    "zeros": b"\0" * 64,
}
NEIGHBOR = "neighbor-abc234"
COMMANDS: dict[str, tuple[click.Command, list[str]]] = {
    "status": (status, []),
    "telemetry": (telemetry, []),
    "compare": (compare, []),
    "top": (top, ["--once"]),
    "logs": (logs, []),
    "logs of a node": (logs, ["--node", "elsewhere"]),
    "wait": (wait, []),
    "checkpoint list": (checkpoints, []),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that has ended, so that `wait` returns."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = time.time()
    run = new_run(tmp_path, now)
    begin(run, now - 60, ["a"], steps=20)
    log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
    log.append({"t": now - 50, "event": "ended", "ending": "completed", "last_step": 20})
    log.close()
    run.attempt(1).logs.mkdir()
    run.attempt(1).rank_log(0).write_text("hello\n")
    run.attempt(1).results.mkdir()
    shutil.copytree(run.path, run.path.with_name(NEIGHBOR))
    return run


def call(command: str, run: RunDir, *more: str) -> Result:
    click_command, options = COMMANDS[command]
    names = [run.id, NEIGHBOR] if click_command is compare else [run.id]
    return CliRunner().invoke(click_command, [*names, *options, *more])


def check_commands(run: RunDir, path: Path) -> None:
    """Check that each command succeeds or names the file, and that none has a traceback."""
    for command in COMMANDS:
        takes_json = any("--json" in p.opts for p in COMMANDS[command][0].params)
        for more in ([], ["--json"]) if takes_json else ([],):
            done = call(command, run, *more)
            if isinstance(done.exception, ClusterTrainError):
                error = done.exception
                assert path.name in error.message or command == "logs of a node", (command, str(error))
                assert error.fix, (command, str(error))
            else:
                assert done.exit_code == 0, (command, more, done.exception, done.exc_info)
    listed = CliRunner().invoke(list_, ["--json"])
    assert listed.exit_code == 0, listed.exception
    document = json.loads(listed.stdout)
    (row,) = (row for row in (*document["runs"], *document["unreadable"]) if row["run"] != NEIGHBOR)
    assert row["run"] == run.id and (row.get("state") == "completed" or path.name in row["error"])


@pytest.mark.parametrize("content", JSON.values(), ids=list(JSON))
@pytest.mark.parametrize("name", ["attempt", "plan", "record", "deadline", "results", "rollbacks"])
def test_json_of_another_shape_is_reported_or_ignored(run: RunDir, name: str, content: bytes) -> None:
    attempt = run.attempt(1)
    path = {
        "attempt": attempt.record,
        "plan": run.plan,
        "record": run.record,
        "deadline": attempt.deadline,
        "results": attempt.result_path("a"),
        "rollbacks": run.rollback_record,
    }[name]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    check_commands(run, path)


@pytest.mark.parametrize("content", TOML.values(), ids=list(TOML))
def test_toml_of_another_shape_is_reported_or_ignored(run: RunDir, content: bytes) -> None:
    run.spec.write_bytes(content)
    check_commands(run, run.spec)


@pytest.mark.parametrize("name", ["attempt", "plan"])
def test_folder_instead_of_a_file_is_reported_or_ignored(run: RunDir, name: str) -> None:
    path = run.attempt(1).record if name == "attempt" else run.plan
    path.unlink(missing_ok=True)
    path.mkdir()
    check_commands(run, path)


def telemetry_json(run: RunDir, *argv: str) -> Any:
    return json.loads(CliRunner().invoke(telemetry, [run.id, *argv, "--json"]).stdout)


def test_damaged_files_are_reported(run: RunDir) -> None:
    run.attempt(1).record.write_text("[1]")
    run.plan.write_text('{"layout": ')
    for command in ("status", "telemetry"):
        text = " ".join(call(command, run).stdout.split())
        assert "attempt.json" in text and "a list" in text, command
        assert "plan.json" in text and "is not JSON" in text, command
    assert len(telemetry_json(run)["read_errors"]) == 2
    (note,) = [n for n in telemetry_json(run)["insights"] if n["code"] == "unreadable"]
    assert "2 files" in note["text"]


def test_attempt_keeps_the_valid_fields_of_its_record(run: RunDir) -> None:
    run.attempt(1).record.write_text('{"job_id": "4711", "restart": "x", "nodes": ["a", 7], "host": "a", "t": true}')
    (attempt,) = attempts.load_attempts(run)
    assert (attempt.job_id, attempt.restart, attempt.nodes, attempt.host) == ("4711", 0, ("a",), "a")
    assert (
        attempt.record_error is not None
        and "restart" in attempt.record_error
        and "attempt.json" in attempt.record_error
    )


def test_missing_or_empty_record_is_not_damage(run: RunDir) -> None:
    """The attempt has just been claimed."""
    run.attempt(1).record.write_text("")
    assert attempts.load_attempts(run)[0].record_error is None
    run.attempt(1).record.unlink()
    assert attempts.load_attempts(run)[0].record_error is None

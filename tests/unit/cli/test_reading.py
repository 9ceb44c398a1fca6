"""``list``, ``logs`` and ``requeue`` over runs whose files a test wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clustertrain import fsio
from clustertrain.cli.jobs import list_, requeue
from clustertrain.cli.logs import logs
from clustertrain.errors import NotFound, UsageError
from clustertrain.run import attempts, run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.local import LocalBackend


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return new_run("good")


def new_run(name: str) -> RunDir:
    made = run_dir.create_run(name)
    made.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
    return made


def printed(run: RunDir, n: int, node: str, text: str) -> None:
    attempt = run.attempt(n)
    attempt.logs.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": "local-1", "nodes": ["a", "b"]})
    (attempt.logs / f"agent-{node}.log").write_text(text)


def call(*argv: str) -> Result:
    return CliRunner().invoke(logs, argv)


def test_what_torchrun_printed_on_a_node_over_all_attempts(run: RunDir) -> None:
    printed(run, 1, "a", "one\n")
    printed(run, 2, "a", "two\n")
    assert call(run.id, "--node", "a").stdout == "one\ntwo\n"
    assert call(run.id, "--node", "a", "--attempt", "2").stdout == "two\n"


def test_an_unknown_node_names_those_that_the_run_had(run: RunDir) -> None:
    printed(run, 1, "a", "one\n")
    unknown, quiet = call(run.id, "--node", "c").exception, call(run.id, "--node", "b").exception
    assert isinstance(unknown, NotFound) and "no node 'c': it has a, b" in str(unknown)
    assert isinstance(quiet, NotFound) and "node b" in str(quiet) and "nothing yet" in str(quiet)
    assert isinstance(call(run.id, "--node", "a", "--job").exception, UsageError)


def test_a_run_that_does_not_read_is_listed_as_such_and_the_others_as_ever(run: RunDir) -> None:
    broken = new_run("broken")
    broken.spec.write_text("version = [\n")
    text = CliRunner().invoke(list_, [])
    assert text.exit_code == 0
    assert f"{broken.id}  unreadable:" in text.stdout and run.id in text.stdout
    rows = {row["run"]: row for row in json.loads(CliRunner().invoke(list_, ["--json"]).stdout)}
    assert set(rows[broken.id]) == {"run", "state", "error"} and rows[broken.id]["state"] is None
    assert "spec.toml" in rows[broken.id]["error"]
    assert rows[run.id]["state"] == "failed"


def test_the_options_of_a_requeue_are_known_to_the_next_one(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda _self, _submission: "local-2")
    done = CliRunner().invoke(requeue, [run.id, "--time", "1:00:00"])
    assert done.exit_code == 0 and "job local-2" in done.stdout
    assert attempts.load_submit_options(run) == {"time": "1:00:00"}

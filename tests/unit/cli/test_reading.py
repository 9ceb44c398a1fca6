"""``list``, ``logs`` and ``requeue``, with files of runs that the tests write."""

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
    run = run_dir.create_run(name)
    run.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
    return run


def write_agent_log(run: RunDir, n: int, node: str, text: str) -> None:
    attempt = run.attempt(n)
    attempt.logs.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": "local-1", "nodes": ["a", "b"]})
    (attempt.logs / f"agent-{node}.log").write_text(text)


def call(*argv: str) -> Result:
    return CliRunner().invoke(logs, argv)


def test_logs_of_a_node_cover_all_attempts(run: RunDir) -> None:
    write_agent_log(run, 1, "a", "one\n")
    write_agent_log(run, 2, "a", "two\n")
    assert call(run.id, "--node", "a").stdout == "one\ntwo\n"
    assert call(run.id, "--node", "a", "--attempt", "2").stdout == "two\n"


def test_unknown_node_names_the_nodes_of_the_run(run: RunDir) -> None:
    write_agent_log(run, 1, "a", "one\n")
    unknown, empty = call(run.id, "--node", "c").exception, call(run.id, "--node", "b").exception
    assert isinstance(unknown, NotFound) and "no node 'c': it has a, b" in str(unknown)
    assert isinstance(empty, NotFound) and "node b" in str(empty) and "nothing yet" in str(empty)
    assert isinstance(call(run.id, "--node", "a", "--job").exception, UsageError)


def test_unreadable_run_is_listed_as_such_beside_the_others(run: RunDir) -> None:
    broken = new_run("broken")
    broken.spec.write_text("version = [\n")
    text = CliRunner().invoke(list_, [])
    assert text.exit_code == 0
    assert f"{broken.id}  unreadable:" in text.stdout and run.id in text.stdout
    document = json.loads(CliRunner().invoke(list_, ["--json"]).stdout)
    (unreadable,) = document["unreadable"]
    assert unreadable["run"] == broken.id and "spec.toml" in unreadable["error"]
    assert {row["run"]: row["state"] for row in document["runs"]} == {run.id: "failed"}


def test_requeue_options_are_kept_for_the_next_requeue(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda _self, _submission: "local-2")
    done = CliRunner().invoke(requeue, [run.id, "--time", "1:00:00"])
    assert done.exit_code == 0 and "job local-2" in done.stdout
    assert attempts.load_submit_options(run) == {"time": "1:00:00"}

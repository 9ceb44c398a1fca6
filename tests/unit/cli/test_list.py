"""Which runs `list` shows, and its output for scripts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clustertrain import clock, fsio
from clustertrain.cli.jobs import list_
from clustertrain.errors import UsageError
from clustertrain.run.run_dir import RunDir
from tests.unit.report import live_runs

NOW = time.time()
SPEC = '[job]\nbackend = "local"\nnodes = 2\ngpus = 4\n'


def call(*argv: str) -> Result:
    return CliRunner().invoke(list_, argv, standalone_mode=False)


def ids(*argv: str) -> list[str]:
    done = call("-q", *argv)
    assert done.exception is None, done.exception
    return done.stdout.splitlines()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunDir]:
    """Return three runs, newest first: running, failed two days ago, and one whose files are damaged."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "now", lambda: NOW)
    found = {}
    for index, (name, age_s) in enumerate({"new": 600, "old": 2 * 86400, "damaged": 3 * 86400}.items()):
        run = live_runs.new_run(tmp_path, NOW, name=f"{name}-abc234", spec=SPEC, submitted=age_s)
        live_runs.begin(run, NOW - age_s, ["a", "b"])
        os.utime(run.spec, (NOW - index, NOW - index))
        found[name] = run
    live_runs.create_job("local-1", found["new"])
    log = fsio.JsonlAppender(found["old"].attempt(1).events_path("batch"))
    log.append({"t": NOW, "event": "ended", "ending": "failed", "reason": "no column"})
    log.append({"t": NOW, "event": "stopped", "reason": "no column"})
    log.close()
    found["damaged"].spec.write_text("version = [\n")
    os.utime(found["damaged"].spec, (NOW - 3 * 86400, NOW - 3 * 86400))
    return found


def test_quiet_prints_ids_alone_without_asking_the_scheduler(
    runs: dict[str, RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clustertrain.scheduler.run_list.run_statuses", lambda _: pytest.fail("asked"))
    assert ids() == ["new-abc234", "old-abc234", "damaged-abc234"]
    assert ids("-n", "1") == ["new-abc234"]


def test_runs_are_selected_by_state_and_by_time(runs: dict[str, RunDir]) -> None:
    assert ids("--state", "running") == ["new-abc234"]
    assert ids("--state", "failed", "--state", "cancelled") == ["old-abc234"]
    assert ids("--since", "1d") == ["new-abc234"] and ids("--since", "60h") == ["new-abc234", "old-abc234"]
    assert ids("--since", "1d", "--state", "failed") == []


def test_the_limit_counts_what_matches(runs: dict[str, RunDir]) -> None:
    assert ids("--state", "failed", "-n", "1") == ["old-abc234"]


def test_a_list_of_nothing_says_so(runs: dict[str, RunDir]) -> None:
    done = call("--state", "pending")
    assert (done.stdout, done.stderr) == ("", "no run matches\n")
    document = json.loads(call("--state", "pending", "--json").stdout)
    assert (document["runs"], document["unreadable"]) == ([], [])


def test_json_has_what_scripts_need(runs: dict[str, RunDir]) -> None:
    document = json.loads(call("--json").stdout)
    new, old = document["runs"]
    assert (new["gpus"], new["gpus_per_node"], new["submitted_unix_s"]) == (8, 4, round(NOW - 600, 3))
    assert new["user"] and new["contract"] is None and new["log"] is None
    assert old["attempts"][0]["end_unix_s"] == round(NOW, 3) and old["state"] == "failed"
    assert [row["run"] for row in document["unreadable"]] == ["damaged-abc234"]
    runs["old"].attempt(1).logs.mkdir()
    runs["old"].attempt(1).rank_log(0).write_text("hello\n")
    assert json.loads(call("--json").stdout)["runs"][1]["log"] == str(runs["old"].attempt(1).rank_log(0))


@pytest.mark.parametrize("argv", [("--since", "soon"), ("--since", "-1h"), ("--quiet", "--json")])
def test_wrong_options_are_refused(runs: dict[str, RunDir], argv: tuple[str, ...]) -> None:
    error = call(*argv).exception
    assert isinstance(error, UsageError) and error.fix


def test_an_unknown_state_names_the_known_ones(runs: dict[str, RunDir]) -> None:
    assert "'cancelling'" in str(call("--state", "dead").exception)


def test_owners_are_shown_if_there_are_several(runs: dict[str, RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "user" not in call().stdout.splitlines()[0]
    monkeypatch.setattr(RunDir, "find_owner", lambda run: "ada" if run.id.startswith("new") else "bob")
    monkeypatch.setenv("COLUMNS", "160")
    title, first, second, *_ = call().stdout.splitlines()
    assert title.split()[:3] == ["run", "user", "state"]
    assert (first.split()[:2], second.split()[:2]) == (["new-abc234", "ada"], ["old-abc234", "bob"])
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for line in call().stdout.splitlines())

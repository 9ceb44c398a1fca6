"""A script that never calls `session.steps`: its steps and its goodput are unknown, and are not reported as 0."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.cli.main import main
from clustertrain.run.run_dir import RunDir
from tests.unit.report.live_runs import alive, begin, new_run, record

Said = Callable[..., str]
SCRIPT = '[job]\nbackend = "local"\n[script]\npath = "train.py"\ncwd = "/tmp"\n'


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)

    def said(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *words])
        code = main()
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return said


def new_script_run(home: Path, name: str, *, ended: bool = True) -> RunDir:
    now = time.time()
    run = new_run(home, now, name=name, spec=SCRIPT, submitted=100.0)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": "local-1", "restart": 0, "nodes": ["a"], "host": "a", "t": now - 90})
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": now - 90, "event": "started", "job_id": "local-1", "nodes": ["a"]})
    log.append({"t": now - 85, "event": "ranks_started", "world_size": 1})
    if ended:
        log.append({"t": now - 5, "event": "ended", "ending": "completed", "reason": "all ranks", "last_step": 0})
    log.close()
    record(run, "a", now - 10, gpus=1, seconds=60, end=ended)
    return run


def test_neither_steps_nor_goodput_are_said_to_be_nothing(said: Said, tmp_path: Path) -> None:
    run = new_script_run(tmp_path, "script-abc234")
    shown = said("status", run.id)
    assert "the script has reported no steps; see docs/guides/training-scripts.md" in shown
    assert "goodput unknown" in shown and "0%;" not in shown
    assert "to 0" not in shown and " - " not in shown
    found = json.loads(said("status", run.id, "--json"))
    assert (found["goodput"]["ratio"], found["goodput"]["effective_ratio"], found["step"]) == (None, None, None)
    assert found["attempts"][0]["last_step"] is None
    assert "Goodput " not in said("telemetry", run.id)
    assert json.loads(said("telemetry", run.id, "--json"))["goodput"]["ratio"] is None
    said("telemetry", run.id, "--html", "page.html")
    assert "the script has reported no steps" in (tmp_path / "page.html").read_text()
    assert "goodput" not in said("top", run.id, "--once")
    other = new_script_run(tmp_path, "other-zzz222")
    compared = json.loads(said("compare", run.id, other.id, "--json"))["telemetry"]
    assert compared["figures"]["goodput"]["a"] is None and compared["goodput"]["productive_s"]["a"] is None


def test_the_built_in_trainer_that_died_before_its_first_step_did_nothing(said: Said, tmp_path: Path) -> None:
    run = new_script_run(tmp_path, "script-abc234")
    run.spec.write_text('[job]\nbackend = "local"\n')
    assert json.loads(said("status", run.id, "--json"))["goodput"]["ratio"] == 0.0


def test_an_attempt_that_goes_on_has_a_state_and_no_ending(said: Said, tmp_path: Path) -> None:
    run = new_run(tmp_path, time.time())
    begin(run, time.time(), ["a"], steps=20)
    alive("local-1", run)
    shown = said("status", run.id)
    assert "ending" not in shown
    assert any(line.split()[-1:] == ["state"] for line in shown.splitlines())

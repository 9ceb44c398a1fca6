"""A script that never calls `session.steps`: its steps and goodput are unknown and are not reported as 0."""

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
from tests.unit.report.live_runs import begin, create_job, new_run, record

RunCli = Callable[..., str]
SCRIPT = '[job]\nbackend = "local"\n[script]\npath = "train.py"\ncwd = "/tmp"\n'


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)

    def run_cli(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        code = main()
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return run_cli


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


@pytest.mark.long
def test_steps_and_goodput_are_unknown_and_not_0(run_cli: RunCli, tmp_path: Path) -> None:
    run = new_script_run(tmp_path, "script-abc234")
    shown = run_cli("status", run.id)
    assert "the program has reported no steps; see https://" in shown and "/guides/any-program/" in shown
    assert "goodput unknown" in shown and "0%;" not in shown
    assert "to 0" not in shown and " - " not in shown
    status = json.loads(run_cli("status", run.id, "--json"))
    assert (status["goodput"]["ratio"], status["goodput"]["effective_ratio"], status["step"]) == (None, None, None)
    assert status["attempts"][0]["last_step"] is None
    assert "Goodput " not in run_cli("telemetry", run.id)
    assert json.loads(run_cli("telemetry", run.id, "--json"))["goodput"]["ratio"] is None
    run_cli("telemetry", run.id, "--html", "page.html")
    assert "the program has reported no steps" in (tmp_path / "page.html").read_text()
    assert "goodput" not in run_cli("top", run.id, "--once")
    other = new_script_run(tmp_path, "other-zzz222")
    telemetry = json.loads(run_cli("compare", run.id, other.id, "--json"))["telemetry"]
    assert telemetry["figures"]["goodput"]["a"] is None and telemetry["goodput"]["productive_s"]["a"] is None


def test_script_that_failed_in_its_session_is_not_sent_to_the_guide_for_programs_without_one(
    run_cli: RunCli, tmp_path: Path
) -> None:
    run = new_script_run(tmp_path, "script-abc234")
    log = fsio.JsonlAppender(run.attempt(1).events_path("rank0"))
    log.append({"t": time.time() - 80, "event": "session_started", "world_size": 1, "device": "cpu"})
    log.close()
    shown = run_cli("status", run.id)
    assert "/guides/any-program/" not in shown
    assert ["step", "none"] in [line.split() for line in shown.splitlines()]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("", "none yet\n"),
        ('command = ["python", "train.py"]\n', "none yet; a program without torch.optim reports none\n"),
    ],
)
def test_status_of_a_script_that_starts_does_not_say_that_it_reports_no_steps(
    run_cli: RunCli, tmp_path: Path, command: str, expected: str
) -> None:
    run = new_script_run(tmp_path, "script-abc234", ended=False)
    run.spec.write_text(SCRIPT + command)
    create_job("local-1", run)
    shown = run_cli("status", run.id)
    assert "running" in shown and expected in shown
    assert "goodput unknown" in shown and shown.count("no steps") == 1


def test_trainer_that_died_before_its_first_step_has_goodput_0(run_cli: RunCli, tmp_path: Path) -> None:
    run = new_script_run(tmp_path, "script-abc234")
    run.spec.write_text('[job]\nbackend = "local"\n')
    assert json.loads(run_cli("status", run.id, "--json"))["goodput"]["ratio"] == 0.0
    assert ["step", "none"] in [line.split() for line in run_cli("status", run.id).splitlines()]  # not "yet": it ended


def test_active_attempt_has_a_state_and_no_ending(run_cli: RunCli, tmp_path: Path) -> None:
    run = new_run(tmp_path, time.time())
    begin(run, time.time(), ["a"], steps=20)
    create_job("local-1", run)
    shown = run_cli("status", run.id)
    assert "ending" not in shown
    assert any(line.split()[-1:] == ["state"] for line in shown.splitlines())

"""The line of ``submit --follow``: phases of the start-up, loss and time left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.cli.follow import _describe, _find_startup_phase, _UnreportedEvents, follow_run
from clustertrain.cli.jobs import wait_for
from clustertrain.report.progress import Progress, load_progress
from clustertrain.scheduler.run_status import run_status
from tests.unit.report import live_runs


@pytest.mark.parametrize(
    ("names", "phase"),
    [
        (set(), "starting ranks"),
        ({"started"}, "starting ranks"),
        ({"started", "session_started", "restored"}, "loading"),
        ({"started", "session_started", "first_step"}, ""),
        ({"started", "ended"}, ""),
    ],
)
def test_startup_has_phases(names: set[str], phase: str) -> None:
    assert _find_startup_phase(names) == phase


def test_line_of_a_running_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = time.time()
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, ["a"])
    live_runs.create_job("local-1", run)
    unreported, status = _UnreportedEvents(run), run_status(run)
    unreported.new_lines()
    line = _describe(status, load_progress(status, now), unreported.startup_phase)
    assert line.startswith("running  loss 1.143  1h1") and line.endswith("m left")
    attempt = run.attempt(2)
    attempt.path.mkdir()
    fsio.write_json(attempt.record, {"job_id": "local-1", "restart": 1, "nodes": ["a"], "host": "a", "t": now})
    unreported.new_lines()
    status = run_status(run)
    assert _describe(status, Progress(), unreported.startup_phase) == "running: starting ranks"
    fsio.write_json(run.cancel_marker, {"t": now})
    assert _describe(status, Progress(), unreported.startup_phase) == "cancelling: starting ranks"


def test_line_of_a_run_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = time.time()
    run = live_runs.new_run(tmp_path, now)
    live_runs.create_job("local-1", run, "PENDING", "Resources", now + 5400)
    line = _describe(run_status(run), Progress(), "starting ranks")
    assert line.startswith("pending: Resources, expected to start ")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_after_a_failure_a_person_sees_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = time.time()
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, ["a"])
    live_runs.create_job("local-1", run, "FAILED")
    log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
    log.append({"t": now, "event": "ended", "ending": "failed", "reason": "no column"})
    log.append({"t": now, "event": "stopped", "reason": "no column"})
    log.close()
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    for wait_for_end in (follow_run, lambda run: wait_for([run], run.id)):
        assert wait_for_end(run) == 1
        assert (f"clustertrain logs {run.id} --errors" in capsys.readouterr().err) is is_terminal

"""The line of ``submit --follow``: phases of the start-up, loss and time left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.cli.follow import _describe, _find_startup_phase, _UnreportedEvents
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

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.run.run_dir import RunDir
from tests.unit.report import live_runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return an active run of two nodes: step 1,200 of 10,000, with telemetry and checkpoints."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = clock.now()
    run = live_runs.new_run(tmp_path, now)
    live_runs.create_job("local-1", run)
    live_runs.begin(run, now, ["n1", "n2"])
    return run

"""How long before the time limit the ranks get the request to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.run.stop_lead_time import DEFAULT_LEAD_S, EXIT_S, compute_lead_s, load_planned_lead_s


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return run_dir.create_run("timed")


def write_measurements(run: RunDir, save_s: float, *steps_s: float, note: str = "") -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("rank-0"))
    log.append({"t": 1.0, "event": "checkpoint", "step": 1, "save_s": save_s})
    log.close()
    rows = fsio.JsonlAppender(run.metrics_path(1))
    rows.append(*({"t": 1.0, "step": i, "step_s": s, "note": note} for i, s in enumerate(steps_s)))
    rows.close()


def test_lead_comes_from_the_plan_before_any_measurement(run: RunDir) -> None:
    assert compute_lead_s(run, None) == DEFAULT_LEAD_S
    fsio.write_json(run.plan, {"signal_lead_s": 45})
    assert compute_lead_s(run, None) == load_planned_lead_s(run) == 45


def test_lead_covers_steps_and_saves_without_the_first_step(run: RunDir) -> None:
    write_measurements(run, 4.0, 90.0, 2.0, 1.0)
    assert compute_lead_s(run, None) == pytest.approx(3 * 2.0 + 3 * 4.0 + EXIT_S)


def test_lead_is_measured_from_long_rows_too(run: RunDir) -> None:
    write_measurements(run, 4.0, 90.0, 1.0, 2.0, *[1.0] * 5, note="x" * 5000)
    assert compute_lead_s(run, None) == pytest.approx(3 * 2.0 + 3 * 4.0 + EXIT_S)


def test_lead_is_at_most_half_of_the_allocation(run: RunDir) -> None:
    write_measurements(run, 200.0, 1.0, 1.0)
    assert compute_lead_s(run, 600.0) == 300.0

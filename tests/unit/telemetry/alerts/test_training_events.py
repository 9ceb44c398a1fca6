"""A warning of rank 0 becomes one alert of its node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run.events import EventLog
from clustertrain.telemetry.alerts.monitor import AlertMonitor
from clustertrain.telemetry.alerts.training_events import READ_INTERVAL_S, TrainingEventReader
from clustertrain.telemetry.snapshot import Snapshot

T0 = 1_790_000_000.0


def warn(path: Path, code: str = "loss_spike", **fields: Any) -> None:
    log = EventLog(path)
    log.write("training_warning", **{"code": code, "step": 7, "text": "the loss is 9", "fix": "wait", **fields})
    log.close()


def codes(training: TrainingEventReader, mono: float) -> list[str]:
    return [f.code for f in training.read(mono)]


def test_reader_resumes_and_limits_its_rate(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    training = TrainingEventReader(path)
    assert codes(training, 0.0) == []  # there is no file yet
    warn(path)
    assert codes(training, READ_INTERVAL_S / 2) == []
    assert codes(training, READ_INTERVAL_S) == ["loss_spike"]
    with path.open("a") as f:
        f.write('{"t": 1, "event": "training_warning", "code": "non_fin')
    assert codes(training, 2 * READ_INTERVAL_S) == []
    with path.open("a") as f:
        f.write('ite", "value": "nan"}\n[1]\nnothing\n{"t": 1, "event": "checkpoint", "step": 4}\n')
    (warning,) = training.read(3 * READ_INTERVAL_S)
    assert (warning.code, warning.severity, warning.value, warning.fix) == ("non_finite", "critical", None, None)


@pytest.mark.parametrize("enabled", [True, False])
def test_training_warning_becomes_alert(tmp_path: Path, enabled: bool) -> None:
    path = tmp_path / "rank-0.jsonl"
    events: list[dict[str, Any]] = []
    alert_monitor = AlertMonitor(
        AlertsSpec(training=enabled), "n0", lambda name, **fields: events.append({"event": name, **fields}), run="r",
        events=path,
    )  # fmt: skip
    for second in range(60):
        if second in (5, 25):
            warn(path, step=second)
        alert_monitor.observe(Snapshot(T0 + second, float(second), "n0", [], [0], {}))
    assert alert_monitor.stop()
    assert [(e["event"], e["code"], e["text"]) for e in events] == (
        [("alert", "loss_spike", "step 5: the loss is 9")] if enabled else []
    )
    json.dumps(events)

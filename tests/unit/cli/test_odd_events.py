"""Valid JSON lines of unexpected content in a run's events, from a bug, another version, or another program."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from clustertrain import fsio
from clustertrain.cli.jobs import list_, status
from clustertrain.cli.telemetry import telemetry
from clustertrain.cli.top import top
from clustertrain.run import attempts, events
from clustertrain.run.run_dir import RunDir
from tests.unit.report.live_runs import begin, new_run

pytestmark = pytest.mark.long

NAMES = (
    "submitted", "started", "agent_started", "ranks_started", "session_started", "restored", "first_step",
    "signal", "save_abandoned", "stop_agreed", "checkpoint", "evaluation", "session_ended", "ranks_ended",
    "gpu_lost", "gpu_back", "gpu_event", "telemetry_failed", "alert", "alert_not_delivered",
    "exporter_failed", "continued", "cancelled", "ended", "requeued", "stopped",
)  # fmt: skip
FIELDS = (
    "t_begin", "monotonic_s", "host", "pid", "job_id", "backend", "restart", "nodes", "end_time", "node", "gpus",
    "world_size", "device", "layout", "step", "restore_s", "total", "signal", "source", "reason", "save",
    "stall_s", "save_s", "bytes", "reason", "eval_s", "ending", "exit_code", "uuid", "index", "kind", "xid",
    "count", "code", "severity", "state", "text", "fix", "rank", "channel", "to", "user", "options", "last_step",
    "ended_at", "method", "exclude",
)  # fmt: skip
ODD: list[Any] = [None, "x", "", [], [None], {}, {"x": None}, True, -1, 1e300, float("nan"), float("inf")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = time.time()
    run = new_run(tmp_path, now)
    begin(run, now - 60, ["a"], steps=20)
    return run


def add_events(run: RunDir, *lines: dict[str, Any]) -> None:
    for path in (run.attempt(1).events_path("odd"), run.events / "odd.jsonl"):
        log = fsio.JsonlAppender(path)
        log.append(*lines)
        log.close()


def check_commands(run: RunDir) -> None:
    """Check that all commands that read a run's events still work."""
    for command, *argv in ((status, run.id), (telemetry, run.id), (top, run.id, "--once"), (list_,)):
        for more in ([], ["--json"]):
            done = CliRunner().invoke(command, [*argv, *more])
            assert done.exit_code == 0, (command.name, more, done.exception)
            assert run.id in done.stdout and "unreadable:" not in done.stdout and '"error"' not in done.stdout
            assert "did not answer" not in done.stdout


@pytest.mark.parametrize("t", [None, "now", [], True, float("nan"), float("inf"), -1e300, 1e300])
def test_event_without_a_valid_time_is_ignored(run: RunDir, t: Any) -> None:
    before = events.for_attempt(run.attempt(1))
    add_events(run, *({"t": t, "event": name, "step": 9, "text": "odd"} for name in NAMES), {"t": t})
    assert events.for_attempt(run.attempt(1)) == before
    check_commands(run)


@pytest.mark.parametrize("name", [None, 7, [], {}])
def test_event_without_a_name_is_ignored(run: RunDir, name: Any) -> None:
    before = events.for_attempt(run.attempt(1))
    add_events(run, {"t": time.time(), "event": name})
    assert events.for_attempt(run.attempt(1)) == before
    check_commands(run)


def test_events_may_lack_all_their_fields(run: RunDir) -> None:
    add_events(run, *({"t": time.time() - 30, "event": name} for name in NAMES))
    check_commands(run)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_event_fields_may_have_unexpected_values(run: RunDir, odd: Any) -> None:
    t, fields = time.time() - 30, dict.fromkeys(FIELDS, odd)
    if odd == "x":  # a valid name, for which the scheduler would be queried
        fields |= {"job_id": "local-1", "backend": "local"}
    add_events(run, *({"t": t, "event": name, **fields} for name in NAMES))
    check_commands(run)


@pytest.mark.parametrize("t", [None, "now", [], True])
def test_row_without_a_time_is_tolerated(run: RunDir, t: Any) -> None:
    log = fsio.JsonlAppender(run.metrics_path(1))
    log.append({"t": t, "step": 21, "loss": t, "step_s": t, "tokens_per_s": t, "sum_step_s": t, "sum_data_wait_s": t})
    log.close()
    check_commands(run)


def test_checkpoint_event_without_a_step_is_ignored(run: RunDir) -> None:
    now = time.time()
    add_events(run, {"t": now, "event": "checkpoint"}, {"t": now, "event": "checkpoint", "step": 10, "save_s": "x"})
    assert attempts.load_attempts(run)[0].committed_step == 10

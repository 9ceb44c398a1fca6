"""What becomes of a node's telemetry when its ranks have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.agent import telemetry
from clustertrain.agent.telemetry import NodeTelemetry
from clustertrain.run import events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.telemetry.store.reader import open_node
from clustertrain.telemetry.store.writer import Writer
from tests.unit.telemetry.recordings import fill, header

SPEC = "version = 1\n"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a killed process may take longer to end than an agent waits for it."""
    monkeypatch.setattr(telemetry, "REAP_S", 60.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "gpt-abc234")
    (made.path / "attempts").mkdir(parents=True)
    made.spec.write_text(SPEC)
    return made


def recorder(run: RunDir, attempt: AttemptDir) -> NodeTelemetry:
    attempt.path.mkdir(parents=True, exist_ok=True)
    log = EventLog(attempt.events_path("agent-n1"))
    return NodeTelemetry(run, attempt, "n1", [0], environ={}, heartbeat_dir=run.path, several_nodes=False, log=log)


def written(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A segment that counts as worth the work."""
    monkeypatch.setattr(telemetry, "MIN_COMPACT_BYTES", 1000)
    writer, of = Writer(attempt.telemetry / "n1"), header()
    writer.begin(of)
    fill(writer, of, 0, 300)
    writer.end(300.0)
    writer.close()
    return attempt.telemetry / "n1" / "0"


def test_an_attempt_that_ended_by_itself_is_compacted(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(run.attempt(1), monkeypatch)
    recorder(run, run.attempt(1)).compact(lambda: False)
    assert (folder / "fast.parquet").exists()
    assert not (folder / "samples.jsonl.gz").exists()
    (segment,) = open_node(folder.parent)
    assert segment.sample_count == 300


def test_little_stays_as_it_was_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(run.attempt(1), monkeypatch)
    monkeypatch.setattr(telemetry, "MIN_COMPACT_BYTES", 1 << 30)
    recorder(run, run.attempt(1)).compact(lambda: False)
    assert (folder / "samples.jsonl.gz").exists()
    assert not (folder / "fast.parquet").exists()


def test_an_order_to_stop_ends_the_compaction_at_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets the child begin, and then does not wait for its end."""
    folder = written(run.attempt(1), monkeypatch)
    monkeypatch.setattr(telemetry, "INTERRUPT_POLL_S", 0.01)
    recorder(run, run.attempt(1)).compact(lambda: True)
    (segment,) = open_node(folder.parent)
    assert (segment.sample_count, segment.read_error) == (300, None)


def test_a_file_in_the_way_does_not_end_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    left = written(run.attempt(1), monkeypatch)
    (run.attempt(1).telemetry / ".nfs000001").write_text("")
    second = recorder(run, run.attempt(2))
    second.compact_earlier()
    assert clock.wait_until(lambda: not (left / "samples.jsonl.gz").exists(), 60, 0.05)
    second.stop()


def test_no_process_to_be_had_is_an_event(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    written(run.attempt(1), monkeypatch)

    def refused(*args: object, **kw: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(telemetry.proc, "start", refused)
    second = recorder(run, run.attempt(2))
    second.compact_earlier()
    second.stop()
    (event,) = events.filter_by_name(events.for_attempt(run.attempt(2)), "telemetry_not_compacted")
    assert "could not be started" in event["reason"]


def test_the_next_attempt_compacts_what_a_preempted_one_left(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    left = written(run.attempt(1), monkeypatch)
    own = written(run.attempt(2), monkeypatch)
    second = recorder(run, run.attempt(2))
    second.compact_earlier()
    assert clock.wait_until(lambda: not (left / "samples.jsonl.gz").exists(), 60, 0.05)
    second.stop()
    assert (left / "fast.parquet").exists()
    assert (own / "samples.jsonl.gz").exists()


def test_a_recipe_without_telemetry_records_nothing(run: RunDir) -> None:
    run.spec.write_text(SPEC + "[recipe.telemetry]\nenabled = false\n")
    attempt = run.attempt(1)
    silent = recorder(run, attempt)
    silent.start()
    silent.suspend()
    silent.stop()
    assert silent.gpus == []
    assert not attempt.telemetry.exists()


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_a_record_that_does_not_read_does_not_end_the_run(run: RunDir, damage: str) -> None:
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.record.write_text(damage)
    recorder(run, attempt).stop()


def test_settings_that_do_not_read_leave_the_defaults(run: RunDir) -> None:
    run.spec.write_text("no = toml = at all")
    recorder(run, run.attempt(1)).stop()
    (event,) = events.filter_by_name(events.for_attempt(run.attempt(1)), "telemetry_failed")
    assert "using the defaults" in event["reason"]

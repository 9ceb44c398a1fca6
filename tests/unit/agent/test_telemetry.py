"""A node's telemetry after its ranks have ended: when and how it is compacted."""

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
def _wait_long_for_killed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for a busy machine, where a killed process may take longer to end than an agent waits for it."""
    monkeypatch.setattr(telemetry, "REAP_S", 60.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "gpt-abc234")
    (run.path / "attempts").mkdir(parents=True)
    run.spec.write_text(SPEC)
    return run


def make_telemetry(run: RunDir, attempt: AttemptDir) -> NodeTelemetry:
    attempt.path.mkdir(parents=True, exist_ok=True)
    log = EventLog(attempt.events_path("agent-n1"))
    return NodeTelemetry(run, attempt, "n1", [0], environ={}, heartbeat_dir=run.path, several_nodes=False, log=log)


def write_segment(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a segment that is large enough to be compacted, and return its folder."""
    monkeypatch.setattr(telemetry, "MIN_COMPACT_BYTES", 1000)
    writer, segment_header = Writer(attempt.telemetry / "n1"), header()
    writer.begin(segment_header)
    fill(writer, segment_header, 0, 300)
    writer.end(300.0)
    writer.close()
    return attempt.telemetry / "n1" / "0"


@pytest.mark.long
def test_uninterrupted_compaction_replaces_the_samples(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_segment(run.attempt(1), monkeypatch)
    make_telemetry(run, run.attempt(1)).compact(lambda: False)
    assert (folder / "fast.parquet").exists()
    assert not (folder / "samples.jsonl.gz").exists()
    (segment,) = open_node(folder.parent)
    assert segment.sample_count == 300


def test_small_segment_is_not_compacted(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_segment(run.attempt(1), monkeypatch)
    monkeypatch.setattr(telemetry, "MIN_COMPACT_BYTES", 1 << 30)
    make_telemetry(run, run.attempt(1)).compact(lambda: False)
    assert (folder / "samples.jsonl.gz").exists()
    assert not (folder / "fast.parquet").exists()


def test_stop_request_interrupts_the_compaction(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent starts the compaction process, but does not wait for its end."""
    folder = write_segment(run.attempt(1), monkeypatch)
    monkeypatch.setattr(telemetry, "INTERRUPT_POLL_S", 0.01)
    make_telemetry(run, run.attempt(1)).compact(lambda: True)
    (segment,) = open_node(folder.parent)
    assert (segment.sample_count, segment.read_error) == (300, None)


@pytest.mark.long
def test_stray_file_does_not_prevent_the_compaction(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    left = write_segment(run.attempt(1), monkeypatch)
    (run.attempt(1).telemetry / ".nfs000001").write_text("")
    second = make_telemetry(run, run.attempt(2))
    second.compact_earlier()
    assert clock.wait_until(lambda: not (left / "samples.jsonl.gz").exists(), 60, 0.05)
    second.stop()


def test_compaction_process_that_cannot_start_is_an_event(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_segment(run.attempt(1), monkeypatch)

    def refused(*args: object, **kw: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(telemetry.proc, "start", refused)
    second = make_telemetry(run, run.attempt(2))
    second.compact_earlier()
    second.stop()
    (event,) = events.filter_by_name(events.for_attempt(run.attempt(2)), "telemetry_not_compacted")
    assert "could not be started" in event["reason"]


def test_without_pyarrow_the_samples_stay(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    left = write_segment(run.attempt(1), monkeypatch)
    own = write_segment(run.attempt(2), monkeypatch)
    monkeypatch.setattr(telemetry.extras, "is_installed", lambda package: package != "pyarrow")
    second = make_telemetry(run, run.attempt(2))
    second.compact_earlier()
    second.stop()
    second.compact(lambda: False)
    assert (left / "samples.jsonl.gz").exists() and (own / "samples.jsonl.gz").exists()
    (event,) = events.filter_by_name(events.for_attempt(run.attempt(2)), "telemetry_not_compacted")
    assert "pip install 'clustertrain[report]'" in event["reason"]


@pytest.mark.long
def test_next_attempt_compacts_what_a_preempted_one_left(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    left = write_segment(run.attempt(1), monkeypatch)
    own = write_segment(run.attempt(2), monkeypatch)
    second = make_telemetry(run, run.attempt(2))
    second.compact_earlier()
    assert clock.wait_until(lambda: not (left / "samples.jsonl.gz").exists(), 60, 0.05)
    second.stop()
    assert (left / "fast.parquet").exists()
    assert (own / "samples.jsonl.gz").exists()


def test_disabled_telemetry_records_nothing(run: RunDir) -> None:
    run.spec.write_text(SPEC + "[recipe.telemetry]\nenabled = false\n")
    attempt = run.attempt(1)
    disabled = make_telemetry(run, attempt)
    disabled.start()
    disabled.suspend()
    disabled.stop()
    assert disabled.gpus == []
    assert not attempt.telemetry.exists()


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_unreadable_attempt_record_does_not_end_the_run(run: RunDir, damage: str) -> None:
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.record.write_text(damage)
    make_telemetry(run, attempt).stop()


def test_unreadable_settings_mean_the_defaults(run: RunDir) -> None:
    run.spec.write_text("no = toml = at all")
    make_telemetry(run, run.attempt(1)).stop()
    (event,) = events.filter_by_name(events.for_attempt(run.attempt(1)), "telemetry_failed")
    assert "using the defaults" in event["reason"]

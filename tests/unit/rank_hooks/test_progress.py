"""Rows and events of a rank with hooks: none is lost, none is counted twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain.rank_hooks.clustertrain_hooks import records, scheduler_signal
from clustertrain.rank_hooks.clustertrain_hooks.checkpoints import list_saved
from clustertrain.rank_hooks.clustertrain_hooks.progress import Progress
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank


def build_progress(folder: Path) -> Progress:
    return Progress(Rank(rank=0, world_size=1, attempt=1, run_dir=str(folder), rank_dir=str(folder)))


def read_rows(folder: Path, name: str = "attempt-1.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics" / name).read_text().splitlines()]


def test_metrics_after_a_save_are_in_a_row_with_a_step(tmp_path: Path) -> None:
    progress = build_progress(tmp_path)
    progress.end_step(1)
    progress.log({"loss": 2.0, "text": "x", "step": 7})
    progress.record_checkpoint("/c/1", 0.0)
    progress.log({"train_runtime": 3.5})
    progress.close()
    first, second = read_rows(tmp_path)
    assert (first["step"], first["loss"], second["step"], second["train_runtime"]) == (1, 2.0, 1, 3.5)


def test_second_program_continues_the_sums_in_a_file_of_its_own(tmp_path: Path) -> None:
    first = build_progress(tmp_path)
    first.begin()
    first.end_step(1)
    first.end_step(2)
    first.close()
    second = build_progress(tmp_path)
    second.begin()
    second.end_step(1)
    second.close()
    total = read_rows(tmp_path)[-1]["sum_step_s"]
    (row,) = read_rows(tmp_path, "attempt-1-1.jsonl")
    assert row["sum_step_s"] == pytest.approx(total + row["step_s"], abs=2e-6)


def test_sums_begin_anew_after_a_torn_row(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "attempt-1.jsonl").write_text('{"step":1,"sum_step_s":2.0}\n{"step":2,"sum_st')
    progress = build_progress(tmp_path)
    progress.begin()
    progress.end_step(1)
    progress.close()
    (row,) = read_rows(tmp_path, "attempt-1-1.jsonl")
    assert row["sum_step_s"] == pytest.approx(row["step_s"], abs=2e-6)


def test_rows_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = build_progress(tmp_path)
    progress.end_step(1)
    progress.end_step(2)
    writer = progress._records
    assert writer is not None

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "_append", fail)
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    progress.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]


def test_phase_stays_idle_after_the_training(tmp_path: Path) -> None:
    progress = build_progress(tmp_path)
    progress.end_step(1)
    progress.close()
    progress.record_evaluation(1.0)
    assert progress._heartbeat.phase == 0


def test_event_that_cannot_be_written_does_not_end_a_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = build_progress(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "_append", fail)
        progress.end_step(1)
    assert progress.step == 1
    assert "event not recorded" in capsys.readouterr().err
    progress.close()


def test_relative_checkpoint_is_recorded_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent, which looks for it, runs in another folder."""
    monkeypatch.chdir(tmp_path)
    progress = build_progress(tmp_path)
    progress.end_step(10)
    progress.record_checkpoint("out/checkpoint-10", 0.0, source="training")
    later = Rank(rank=0, world_size=1, attempt=2, run_dir=str(tmp_path), rank_dir=str(tmp_path))
    assert list_saved(later, "training") == [str(tmp_path / "out" / "checkpoint-10")]
    progress.close()


@pytest.fixture
def no_handler() -> Iterator[None]:
    """Give SIGTERM its default action: earlier tests of the process may have left a handler."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("no_handler")
def test_only_a_program_without_a_handler_can_say_that_it_is_done(tmp_path: Path) -> None:
    def is_finished() -> bool:
        return bool(json.loads((tmp_path / "progress-0.json").read_text())["finished"])

    progress = build_progress(tmp_path)
    progress.begin()
    progress.finish()
    assert is_finished()
    progress.begin()  # a second training of the program
    assert not is_finished()
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        progress.finish()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not is_finished()


@pytest.mark.parametrize(("stop_signal", "is_finished"), [("USR1", False), ("TERM", True), ("none", True)])
def test_handler_of_the_stop_signal_leaves_the_end_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_signal: str, is_finished: bool
) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_STOP_SIGNAL", stop_signal)
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    term = signal.signal(signal.SIGTERM, scheduler_signal._ignore)  # of the hooks themselves
    try:
        build_progress(tmp_path).finish()
    finally:
        signal.signal(signal.SIGUSR1, previous)
        signal.signal(signal.SIGTERM, term)
    assert json.loads((tmp_path / "progress-0.json").read_text())["finished"] is is_finished

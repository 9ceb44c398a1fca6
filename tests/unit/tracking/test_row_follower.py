"""Rows for trackers: each step once, whatever attempts repeat and however a writer was killed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from clustertrain.run import metric_curves, metrics
from clustertrain.tracking import row_follower
from clustertrain.tracking.row_follower import RowFollower, scalars
from clustertrain.tracking.tracker import TrackerUploader
from tests.unit.tracking.tracked_runs import make, row, write


def steps(rows: list[row_follower.Row]) -> list[int]:
    return [r["step"] for r in rows]


def test_new_rows_are_read_once(tmp_path: Path) -> None:
    run = make(tmp_path)
    follower = RowFollower(run)
    assert follower.read() == []
    write(run, 1, 1, 3)
    assert steps(follower.read()) == [1, 2, 3] and follower.read() == []
    write(run, 1, 4, 5)
    assert follower.read() == [{**row(4), "attempt": 1}, {**row(5), "attempt": 1}]


def test_unfinished_line_waits_and_torn_line_is_skipped(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 2)
    path = run.metrics_path(1)
    complete = path.read_bytes()
    follower = RowFollower(run)
    path.write_bytes(complete[:-5])
    assert steps(follower.read()) == [1]
    path.write_bytes(complete)
    assert steps(follower.read()) == [2]
    path.write_bytes(complete + b'{"step": 3, "lo\n')
    write(run, 1, 4, 4)
    assert steps(follower.read()) == [4]


def test_steps_repeated_by_a_later_attempt_are_skipped(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 6)
    follower = RowFollower(run)
    assert len(follower.read()) == 6
    write(run, 2, 5, 8)
    rows = follower.read()
    assert [(r["step"], r["attempt"]) for r in rows] == [(7, 2), (8, 2)]


def test_repeated_steps_use_the_last_attempts_values(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 6)
    write(run, 2, 4, 8)
    write(run, 3, 3, 5)
    assert RowFollower(run).read() == metrics.load_rows(run)
    assert [r["attempt"] for r in RowFollower(run, after=2).read()] == [3, 3, 3]


def test_attempt_without_rows_is_skipped(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 2)
    run.attempt(2).path.mkdir()
    write(run, 3, 3, 4)
    assert steps(RowFollower(run).read()) == [1, 2, 3, 4]


def test_read_returns_at_most_max_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_follower, "CHUNK", 64)  # less than a line
    run = make(tmp_path)
    write(run, 1, 1, 10)
    write(run, 2, 8, 12)
    follower = RowFollower(run)
    reads = [steps(follower.read(4)) for _ in range(4)]
    assert reads == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], []]


def test_interrupted_evaluation_is_replaced_by_its_repetition(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 3)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    follower = RowFollower(run)
    assert steps(follower.read()) == [1, 2, 3]
    write(run, 2, 4, 4, validation_loss=0.5)
    write(run, 2, 5, 5)
    rows = follower.read()
    assert steps(rows) == [4, 5] and rows[0]["validation_loss"] == 0.5
    assert RowFollower(run, after=3).read() == rows


@pytest.mark.parametrize("first", [3, 5])
def test_interrupted_evaluation_is_released_by_a_later_step(tmp_path: Path, first: int) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 3)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    follower = RowFollower(run)
    assert steps(follower.read()) == [1, 2, 3]
    write(run, 2, first, 6)
    rows = follower.read()
    assert [(r["step"], r["attempt"]) for r in rows] == [(4, 2 if first == 3 else 1), (5, 2), (6, 2)]
    assert RowFollower(run, after=3).read() == rows


class RecordingTracker:
    """A tracker that records its calls."""

    name = "recording"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ending: str | None = ""

    def open(self) -> int:
        return -1

    def log_rows(self, rows: Sequence[row_follower.Row]) -> None:
        self.steps += [row["step"] for row in rows]

    def close(self, ending: str | None) -> None:
        self.ending = ending

    def abandon(self) -> None:
        pass


@pytest.mark.parametrize(
    ("ending", "expected"), [(None, [1, 2, 3]), ("failed", [1, 2, 3, 4])], ids=["stopped", "failed"]
)
def test_interrupted_evaluation_is_released_at_the_end(tmp_path: Path, ending: str | None, expected: list[int]) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 3)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    tracker = RecordingTracker()
    uploader = TrackerUploader(
        run, tracker, lambda name, reason: pytest.fail(reason), get_ending=lambda: ending, retry=False
    )
    uploader.request_stop()
    uploader.thread.run()
    assert (tracker.steps, tracker.ending, uploader.last_step) == (expected, ending, expected[-1])


def test_scalars_are_numbers_without_step_time_and_totals() -> None:
    assert scalars({**row(3), "attempt": 2, "flag": True, "none": None}) == {
        "loss": row(3)["loss"],
        "lr": 1e-3,
        "flag": 1,
    }


def test_rolled_back_attempt_continues_in_another_file(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 6)
    follower = RowFollower(run)
    assert steps(follower.read()) == [1, 2, 3, 4, 5, 6]
    write(run, 9, 4, 8)  # written as another attempt, which the rows do not contain, then moved
    run.metrics_path(9).rename(run.metrics_path(1, 1))
    shutil.rmtree(run.attempt(9).path)
    rows = follower.read()
    assert [(r["step"], r["attempt"]) for r in rows] == [(7, 1), (8, 1)]
    assert steps(RowFollower(run).read()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert RowFollower(run).read() == metrics.load_rows(run)
    assert metric_curves.load_step_table(run, ["loss"]).step == [1, 2, 3, 4, 5, 6, 7, 8]

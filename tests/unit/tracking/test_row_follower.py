"""Rows as trackers are given them: each step once, whatever attempts repeated and however a writer was killed."""

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


def steps(found: list[row_follower.Row]) -> list[int]:
    return [r["step"] for r in found]


def test_what_is_written_meanwhile_comes_once(tmp_path: Path) -> None:
    run = make(tmp_path)
    follower = RowFollower(run)
    assert follower.read() == []
    write(run, 1, 1, 3)
    assert steps(follower.read()) == [1, 2, 3] and follower.read() == []
    write(run, 1, 4, 5)
    assert follower.read() == [{**row(4), "attempt": 1}, {**row(5), "attempt": 1}]


def test_half_a_line_waits_for_its_end_and_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 2)
    path = run.metrics_path(1)
    whole = path.read_bytes()
    follower = RowFollower(run)
    path.write_bytes(whole[:-5])
    assert steps(follower.read()) == [1]
    path.write_bytes(whole)
    assert steps(follower.read()) == [2]
    path.write_bytes(whole + b'{"step": 3, "lo\n')
    write(run, 1, 4, 4)
    assert steps(follower.read()) == [4]


def test_steps_that_a_later_attempt_repeats_do_not_come_again(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 6)
    follower = RowFollower(run)
    assert len(follower.read()) == 6
    write(run, 2, 5, 8)
    found = follower.read()
    assert [(r["step"], r["attempt"]) for r in found] == [(7, 2), (8, 2)]


def test_behind_a_requeue_a_repeated_step_counts_as_the_last_attempt_ran_it(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 6)
    write(run, 2, 4, 8)
    write(run, 3, 3, 5)
    assert RowFollower(run).read() == metrics.load_rows(run)
    assert [r["attempt"] for r in RowFollower(run, after=2).read()] == [3, 3, 3]


def test_an_attempt_without_rows_hides_nothing(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 2)
    run.attempt(2).path.mkdir()
    write(run, 3, 3, 4)
    assert steps(RowFollower(run).read()) == [1, 2, 3, 4]


def test_as_many_as_are_asked_for_and_the_rest_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_follower, "CHUNK", 64)  # less than a line
    run = make(tmp_path)
    write(run, 1, 1, 10)
    write(run, 2, 8, 12)
    follower = RowFollower(run)
    found = [steps(follower.read(4)) for _ in range(4)]
    assert found == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], []]


def test_a_row_whose_evaluation_was_cut_short_comes_once_with_what_it_found(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 3)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    follower = RowFollower(run)
    assert steps(follower.read()) == [1, 2, 3]
    write(run, 2, 4, 4, validation_loss=0.5)
    write(run, 2, 5, 5)
    found = follower.read()
    assert steps(found) == [4, 5] and found[0]["validation_loss"] == 0.5
    assert RowFollower(run, after=3).read() == found


@pytest.mark.parametrize("first", [3, 5])
def test_or_as_it_is_where_nobody_makes_up_for_it(tmp_path: Path, first: int) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 3)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    follower = RowFollower(run)
    assert steps(follower.read()) == [1, 2, 3]
    write(run, 2, first, 6)
    found = follower.read()
    assert [(r["step"], r["attempt"]) for r in found] == [(4, 2 if first == 3 else 1), (5, 2), (6, 2)]
    assert RowFollower(run, after=3).read() == found


class Noting:
    """A tracker that writes down what it is told."""

    name = "noting"

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


@pytest.mark.parametrize(("ending", "handed"), [(None, [1, 2, 3]), ("failed", [1, 2, 3, 4])])
def test_or_at_the_end_of_the_run(tmp_path: Path, ending: str | None, handed: list[int]) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 3)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    noting = Noting()
    handing = TrackerUploader(run, noting, lambda name, why: pytest.fail(why), get_ending=lambda: ending, retry=False)
    handing.request_stop()
    handing.thread.run()
    assert (noting.steps, noting.ending, handing.last_step) == (handed, ending, handed[-1])


def test_numbers_alone_are_worth_a_curve() -> None:
    assert scalars({**row(3), "attempt": 2, "flag": True, "none": None}) == {
        "loss": row(3)["loss"],
        "lr": 1e-3,
        "flag": 1,
    }


def test_an_attempt_that_went_back_goes_on_in_a_file_of_its_own(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 6)
    follower = RowFollower(run)
    assert steps(follower.read()) == [1, 2, 3, 4, 5, 6]
    write(run, 9, 4, 8)  # under another number, for the rows' own content does not tell
    run.metrics_path(9).rename(run.metrics_path(1, 1))
    shutil.rmtree(run.attempt(9).path)
    found = follower.read()
    assert [(r["step"], r["attempt"]) for r in found] == [(7, 1), (8, 1)]
    assert steps(RowFollower(run).read()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert RowFollower(run).read() == metrics.load_rows(run)
    assert metric_curves.load_step_table(run, ["loss"]).step == [1, 2, 3, 4, 5, 6, 7, 8]

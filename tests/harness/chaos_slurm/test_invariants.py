"""The storm's judges: each finds the violation that it is for, and none where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.chaos_slurm import faults, invariants
from tests.harness.chaos_slurm.rounds import plan_of


def attempt(n: int, steps: Sequence[int], *, at: float, committed: int = 0, ranks: int = 2) -> list[dict[str, Any]]:
    """The lines of an attempt whose ranks begin at ``at`` and do a step a second."""
    lines: list[dict[str, Any]] = []
    for rank in range(ranks):
        lines.append({"attempt": n, "rank": rank, "begin": at, "committed": committed})
        lines += [
            {"attempt": n, "rank": rank, "step": step, "start": at + i, "end": at + i + 0.9, "wall": at + i + 1000}
            for i, step in enumerate(steps)
        ]
    return lines


SOUND = attempt(1, [1, 2, 3, 4, 5, 6], at=0.0) + attempt(2, [6, 7, 8], at=10.0, committed=5)


def test_a_run_that_was_continued_in_order_breaks_nothing() -> None:
    assert invariants.overlaps(SOUND) == []
    assert invariants.lost_steps(SOUND) == []


@pytest.mark.parametrize("steps", [[6, 7, 8, 9], [6]])
def test_two_attempts_that_train_at_once(steps: list[int]) -> None:
    lines = attempt(1, [1, 2, 3, 4, 5, 6], at=0.0) + attempt(2, steps, at=5.5, committed=5)
    (found,) = invariants.overlaps(lines)
    assert "attempts 1 and 2 trained at the same time" in found


def test_an_attempt_far_older_than_the_newest_that_trains_with_it() -> None:
    lines = [*SOUND, *attempt(1, [7], at=11.0), *attempt(3, [9], at=20.0, committed=8)]
    (found,) = invariants.overlaps(lines)
    assert "attempts 1 and 2" in found


def test_an_attempt_that_was_cut_off_may_train_until_it_commits() -> None:
    lines = attempt(1, range(1, 12), at=0.0) + attempt(2, [6, 7, 8], at=8.0, committed=5)
    assert invariants.overlaps(lines, cut_off={1}) == []
    assert invariants.late_commits(lines, {1: [{"step": 5, "t": 1005.0}], 2: [{"step": 8, "t": 1012.0}]}) == []
    (found,) = invariants.late_commits(lines, {1: [{"step": 5, "t": 1005.0}, {"step": 10, "t": 1010.0}]})
    assert found == "attempt 1 committed steps [10] after attempt 2 had begun to train"


def test_an_attempt_that_begins_before_the_newest_commit_has_lost_steps() -> None:
    lines = attempt(1, [1, 2, 3, 4, 5, 6], at=0.0) + attempt(2, [1, 2], at=10.0, committed=5)
    assert invariants.lost_steps(lines) == ["attempt 2 began at step 1 where step 5 was committed"]


def test_an_attempt_may_go_on_after_a_commit_that_came_while_it_began() -> None:
    lines = attempt(1, range(1, 12), at=0.0) + attempt(2, [11, 12], at=20.0, committed=5)
    assert invariants.lost_steps(lines) == []


def test_an_attempt_that_begins_after_a_step_that_nobody_did() -> None:
    lines = attempt(1, [1, 2, 3], at=0.0) + attempt(2, [9], at=10.0, committed=5)
    assert invariants.lost_steps(lines) == ["attempt 2 began at step 9 where no attempt had done step 8"]


def test_a_rank_that_leaves_out_a_step() -> None:
    found = invariants.lost_steps(attempt(1, [1, 2, 4], at=0.0, ranks=1))
    assert found == ["rank 0 of attempt 1 left out or repeated a step: 2 then 4"]


def ended(n: int, ending: str) -> dict[str, Any]:
    return {"n": n, "state": ending, "reason": "said so"}


def untrue(*attempts: dict[str, Any], total: int = 8) -> list[str]:
    return invariants.untrue_endings(attempts, {1: {"preempted"}}, SOUND, total)


def test_endings_that_are_true() -> None:
    assert untrue(ended(1, "preempted"), ended(2, "completed")) == []
    assert untrue(ended(1, "preempted"), ended(2, "running")) == []


def test_an_ending_that_nothing_explains() -> None:
    (found,) = untrue(ended(1, "node_failure"), ended(2, "completed"))
    assert "attempt 1 is recorded as node_failure (said so); true would be: preempted" in found


def test_an_attempt_that_is_called_completed_before_the_last_step() -> None:
    (found,) = untrue(ended(1, "preempted"), ended(2, "completed"), total=20)
    assert "attempt 2 is recorded as completed, and its last step was 8 of 20" in found


def test_an_attempt_without_an_ending_that_another_follows() -> None:
    (found,) = untrue(ended(1, "running"), ended(2, "completed"))
    assert "attempt 1 has no ending" in found


@pytest.fixture
def left(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of attempt 2 of the run in tmp_path."""
    env = {**os.environ, "CLUSTERTRAIN_RUN_DIR": str(tmp_path), "CLUSTERTRAIN_ATTEMPT": "2"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_is_left(tmp_path: Path, left: subprocess.Popen[bytes]) -> None:
    (found,) = invariants.processes_left(tmp_path)
    assert f"process {left.pid} of attempt 2" in found
    assert invariants.processes_left(tmp_path, before=3) == [found]
    assert invariants.processes_left(tmp_path, before=2) == []
    assert invariants.processes_left(tmp_path / "another") == []
    left.kill()
    left.wait()
    assert invariants.processes_left(tmp_path) == []


def test_files_that_are_left(tmp_path: Path) -> None:
    assert invariants.files_left(tmp_path) == []
    (tmp_path / "events").mkdir()
    half = tmp_path / "events" / ".half-written.json.1234"
    half.touch()
    rank_dir = Path(f"/tmp/clustertrain-{tmp_path.name}-x")
    rank_dir.mkdir()
    try:
        assert invariants.files_left(tmp_path) == [str(half), str(rank_dir)]
        assert invariants.files_left(tmp_path, lost_rank_dirs=1) == [str(half)]
    finally:
        rank_dir.rmdir()


def test_a_round_is_the_same_each_time_it_is_drawn() -> None:
    assert [plan_of("seed", n) for n in range(50)] == [plan_of("seed", n) for n in range(50)]
    assert [plan_of("seed", n) for n in range(50)] != [plan_of("other", n) for n in range(50)]


def test_all_that_can_happen_is_drawn_in_the_rounds_of_a_long_storm() -> None:
    drawn = [plan_of("1", n).fault for n in range(300)]
    assert {f.kind for f in drawn} == faults.MENU.keys()
    assert {f.during for f in drawn} == faults.DURING.keys()
    assert {f.moment for f in drawn} == set(faults.MOMENTS)
    away = [f.seconds for f in drawn if faults.MENU[f.kind].away]
    assert min(away) < 10 and max(away) > 70

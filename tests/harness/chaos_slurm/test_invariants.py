"""Each invariant of the storm reports its violation, and nothing for a sound run."""

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
    """Return the lines of an attempt whose ranks start at ``at`` and train one step per second."""
    lines: list[dict[str, Any]] = []
    for rank in range(ranks):
        lines.append({"attempt": n, "rank": rank, "begin": at, "committed": committed})
        lines += [
            {"attempt": n, "rank": rank, "step": step, "start": at + i, "end": at + i + 0.9, "wall": at + i + 1000}
            for i, step in enumerate(steps)
        ]
    return lines


SOUND = attempt(1, [1, 2, 3, 4, 5, 6], at=0.0) + attempt(2, [6, 7, 8], at=10.0, committed=5)


def test_sound_run_has_no_violations() -> None:
    assert invariants.overlaps(SOUND) == []
    assert invariants.lost_steps(SOUND) == []


@pytest.mark.parametrize("steps", [[6, 7, 8, 9], [6]])
def test_overlap_of_two_attempts_is_reported(steps: list[int]) -> None:
    lines = attempt(1, [1, 2, 3, 4, 5, 6], at=0.0) + attempt(2, steps, at=5.5, committed=5)
    (violation,) = invariants.overlaps(lines)
    assert "attempts 1 and 2 trained at the same time" in violation


def test_overlap_with_a_much_older_attempt_is_reported() -> None:
    lines = [*SOUND, *attempt(1, [7], at=11.0), *attempt(3, [9], at=20.0, committed=8)]
    (violation,) = invariants.overlaps(lines)
    assert "attempts 1 and 2" in violation


def test_cut_off_attempt_may_train_until_it_commits() -> None:
    lines = attempt(1, range(1, 12), at=0.0) + attempt(2, [6, 7, 8], at=8.0, committed=5)
    assert invariants.overlaps(lines, cut_off={1}) == []
    assert invariants.late_commits(lines, {1: [{"step": 5, "t": 1005.0}], 2: [{"step": 8, "t": 1012.0}]}) == []
    (violation,) = invariants.late_commits(lines, {1: [{"step": 5, "t": 1005.0}, {"step": 10, "t": 1010.0}]})
    assert violation == "attempt 1 committed steps [10] after attempt 2 had started to train"


def test_start_before_the_newest_commit_loses_steps() -> None:
    lines = attempt(1, [1, 2, 3, 4, 5, 6], at=0.0) + attempt(2, [1, 2], at=10.0, committed=5)
    assert invariants.lost_steps(lines) == ["attempt 2 started at step 1, but step 5 was committed"]


def test_start_after_a_concurrent_commit_is_allowed() -> None:
    lines = attempt(1, range(1, 12), at=0.0) + attempt(2, [11, 12], at=20.0, committed=5)
    assert invariants.lost_steps(lines) == []


def test_start_after_an_untrained_step_is_reported() -> None:
    lines = attempt(1, [1, 2, 3], at=0.0) + attempt(2, [9], at=10.0, committed=5)
    assert invariants.lost_steps(lines) == ["attempt 2 started at step 9, but no attempt has trained step 8"]


def test_skipped_step_of_a_rank_is_reported() -> None:
    violation = invariants.lost_steps(attempt(1, [1, 2, 4], at=0.0, ranks=1))
    assert violation == ["rank 0 of attempt 1 skipped or repeated a step: 2 then 4"]


def ended(n: int, ending: str) -> dict[str, Any]:
    return {"n": n, "state": ending, "reason": "for a reason"}


def find_wrong_endings(*attempts: dict[str, Any], total: int = 8) -> list[str]:
    return invariants.wrong_endings(attempts, {1: {"preempted"}}, SOUND, total)


def test_correct_endings_are_not_reported() -> None:
    assert find_wrong_endings(ended(1, "preempted"), ended(2, "completed")) == []
    assert find_wrong_endings(ended(1, "preempted"), ended(2, "running")) == []


def test_unexplained_ending_is_reported() -> None:
    (violation,) = find_wrong_endings(ended(1, "node_failure"), ended(2, "completed"))
    assert "attempt 1 is recorded as node_failure (for a reason); correct would be: preempted" in violation


def test_completed_before_the_last_step_is_reported() -> None:
    (violation,) = find_wrong_endings(ended(1, "preempted"), ended(2, "completed"), total=20)
    assert "attempt 2 is recorded as completed, but its last step was 8 of 20" in violation


def test_missing_ending_of_an_earlier_attempt_is_reported() -> None:
    (violation,) = find_wrong_endings(ended(1, "running"), ended(2, "completed"))
    assert "attempt 1 has no ending" in violation


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of attempt 2 of the run in tmp_path."""
    env = {**os.environ, "CLUSTERTRAIN_RUN_DIR": str(tmp_path), "CLUSTERTRAIN_ATTEMPT": "2"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_remaining_process_is_reported_by_attempt(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    (violation,) = invariants.remaining_processes(tmp_path)
    assert f"process {process.pid} of attempt 2" in violation
    assert invariants.remaining_processes(tmp_path, before=3) == [violation]
    assert invariants.remaining_processes(tmp_path, before=2) == []
    assert invariants.remaining_processes(tmp_path / "another") == []
    process.kill()
    process.wait()
    assert invariants.remaining_processes(tmp_path) == []


def test_remaining_temporary_files_are_reported(tmp_path: Path) -> None:
    assert invariants.remaining_files(tmp_path) == []
    (tmp_path / "events").mkdir()
    temporary_file = tmp_path / "events" / ".half-written.json.1234"
    temporary_file.touch()
    rank_dir = Path(f"/tmp/clustertrain-{tmp_path.name}-x")
    rank_dir.mkdir()
    try:
        assert invariants.remaining_files(tmp_path) == [str(temporary_file), str(rank_dir)]
        assert invariants.remaining_files(tmp_path, orphaned_rank_dirs=1) == [str(temporary_file)]
    finally:
        rank_dir.rmdir()


def test_drawn_rounds_depend_only_on_the_seed() -> None:
    assert [plan_of("seed", n) for n in range(50)] == [plan_of("seed", n) for n in range(50)]
    assert [plan_of("seed", n) for n in range(50)] != [plan_of("other", n) for n in range(50)]


def test_long_storm_draws_every_kind_and_moment() -> None:
    drawn_faults = [plan_of("1", n).fault for n in range(300)]
    assert {f.kind for f in drawn_faults} == faults.MENU.keys()
    assert {f.during for f in drawn_faults} == faults.DURING.keys()
    assert {f.moment for f in drawn_faults} == set(faults.MOMENTS)
    durations = [f.seconds for f in drawn_faults if faults.MENU[f.kind].lasts]
    assert min(durations) < 10 and max(durations) > 70

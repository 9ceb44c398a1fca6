"""A loop of the program's own with ``attach``, outside a run: it counts, saves and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

import clustertrain as ct


def build_job(folder: Path, loaded: list[str], **options: int) -> ct.Job:
    return ct.attach(
        save=lambda path: Path(path, "state").write_text("state"), load=loaded.append, folder=str(folder), **options
    )


def test_loop_resumes_after_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    loaded: list[str] = []
    job = build_job(tmp_path, loaded, every=4)
    for step in job.steps(20):
        if step == 10:
            break
    (tmp_path / "step-12").mkdir()  # a save that did not end
    again = build_job(tmp_path, loaded, every=4)
    assert list(again.steps(20)) == list(range(8, 20))
    assert (loaded, again.step) == ([str(tmp_path / "step-8")], 20)


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    list(build_job(tmp_path, [], every=3, keep=2).steps(10))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-9"]


def test_nothing_is_saved_without_a_stop(tmp_path: Path) -> None:
    assert list(build_job(tmp_path, []).steps(3)) == [0, 1, 2]
    assert not list(tmp_path.iterdir())


def test_second_loop_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    job = build_job(tmp_path, [])
    list(job.steps(1))
    with pytest.raises(RuntimeError, match="one loop of steps"):
        list(job.steps(1))
    with pytest.raises(ValueError, match="keep = 0 must be 1 or more"):
        build_job(tmp_path, [], keep=0)


def test_what_is_in_a_checkpoint_is_the_programs(tmp_path: Path) -> None:
    """COMPLETE.json says that a checkpoint is whole, whatever its files are named."""
    loaded: list[str] = []
    options = {"load": loaded.append, "folder": str(tmp_path), "every": 2}
    for step in ct.attach(save=lambda path: Path(path, "weights.bin").write_bytes(b"raw"), **options).steps(9):
        if step == 5:
            break
    assert list(ct.attach(save=lambda path: None, **options).steps(6)) == [4, 5]
    assert loaded == [str(tmp_path / "step-4")]

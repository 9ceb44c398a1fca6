"""Whether a restarted writer must write its part again."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.checkpoint.save import commit
from clustertrain.checkpoint.save.writer_jobs import WriteJob


@pytest.fixture
def job(tmp_path: Path) -> WriteJob:
    folder = tmp_path / ".step-00000004-1-abcd"
    folder.mkdir()
    return WriteJob(
        step=4, folder=str(folder), rank=1, engine="raw", buffer_index=0, segments=[], rank_values=None
    )  # fmt: skip


def test_part_without_its_done_file_is_written(job: WriteJob) -> None:
    assert not commit.is_part_complete(job)


def test_part_with_its_done_file_is_complete(job: WriteJob) -> None:
    commit.done_file(Path(job.folder), job.rank).touch()
    assert commit.is_part_complete(job)


def test_part_is_complete_after_rank_0_removed_the_done_files(job: WriteJob) -> None:
    """Between the commit marker and the rename, rank 0 has removed the done-files; the part must not be removed."""
    (Path(job.folder) / "COMMITTED").touch()
    assert commit.is_part_complete(job)


def test_folder_that_is_renamed_meanwhile_is_complete(job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    commit.done_file(Path(job.folder), job.rank).touch()
    sync = commit.fsio.fsync_folder

    def rename_then_sync(folder: Path) -> None:
        folder.rename(folder.with_name("step-00000004"))
        sync(folder)

    monkeypatch.setattr(commit.fsio, "fsync_folder", rename_then_sync)
    assert commit.is_part_complete(job)

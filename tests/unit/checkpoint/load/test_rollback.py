"""The record of roll-backs: what it condemns, what is left out, and when it is once too often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import CheckpointError, Diverged, NotFound


def committed(root: Path, *steps: int, mark: str = "a") -> None:
    for step in steps:
        folder = index.step_folder(root, step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / index.COMMITTED).write_text(f"{mark}-{step}")


def steps(root: Any) -> list[int]:
    return [index.parse_step(p) or 0 for p in index.list_checkpoint_folders(root) if index.is_committed(p)]


def wanted(**changes: Any) -> RollbackTarget:
    fields = {
        "last_step": 20,
        "max_step": 19,
        "reason": "a spike",
        "excluded": {"data": [[152, 160]]},
        "max_rollbacks": 2,
    }
    return RollbackTarget(**{**fields, **changes})


def test_what_is_newer_does_not_count_and_stays_away_whenever_it_is_asked(tmp_path: Path) -> None:
    committed(tmp_path, 6, 12, 18, 24)
    rollback.record_rollback(tmp_path, None, wanted(max_step=12))
    assert steps(tmp_path) == [6, 12, 18, 24]  # only written down so far
    for _ in range(2):
        rollback.apply_records(tmp_path, None)
        assert steps(tmp_path) == [6, 12]
    committed(tmp_path, 18, mark="b")  # made on the way back: another one
    rollback.apply_records(tmp_path, None)
    assert steps(tmp_path) == [6, 12, 18]
    assert rollback.excluded_ranges(tmp_path) == {"data": [[152, 160]]}


def test_what_looks_offline_does_not_see_what_is_condemned_and_still_there(tmp_path: Path) -> None:
    """As after a stop at the step of the way back: the next attempt deletes them, and may never come."""
    committed(tmp_path, 6, 12)
    for step, value in ((12, 2.0), (18, 1.0)):
        folder = index.step_folder(tmp_path, step)
        folder.mkdir(exist_ok=True)
        fields: dict[str, Any] = {"layout": {}, "files": {}, "tensors": (), "values": {}}
        metric = index.CheckpointMetric(name="loss", value=value)
        about: dict[str, Any] = {"format": index.FORMAT_VERSION, "torch": "2", "world_size": 1, "engine": "buffered"}
        index.write_manifest(folder, index.Manifest(step=step, metric=metric, **about, **fields))
    rollback.record_rollback(tmp_path, None, wanted(max_step=12))
    assert steps(tmp_path) == [6, 12, 18]
    assert [row["step"] for row in inspect.list_checkpoints(tmp_path)] == [6, 12]
    assert inspect.find_checkpoint(tmp_path) == inspect.find_best(tmp_path) == index.step_folder(tmp_path, 12)
    with pytest.raises(NotFound, match=r"of step 18; existing steps: 6, 12$"):
        inspect.find_checkpoint(tmp_path, 18)
    # Deleted by hand must not be what the run goes back to.
    assert inspect.list_prunable(tmp_path, 1, is_valid=lambda _: True) == [index.step_folder(tmp_path, 6)]
    remote = RemoteFolder(tmp_path.as_uri())  # has no record beside it
    assert index.parse_step(inspect.find_checkpoint(remote)) == 18


def test_copies_behind_a_url_lose_their_marker(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    committed(here, 6, 18)
    committed(there, 6, 18)
    committed(there, 24, mark="b")
    remote = RemoteFolder(there.as_uri())
    rollback.record_rollback(here, remote, wanted())
    assert rollback.is_valid(here, index.step_folder(remote, 6), 6)
    assert rollback.is_valid(here, index.step_folder(remote, 18), 18)
    assert not rollback.is_valid(here, index.step_folder(remote, 24), 24)
    rollback.apply_records(here, remote)
    assert steps(here) == [6, 18] and steps(there) == [6, 18]


def test_with_no_older_checkpoint_there_is_no_way_back(tmp_path: Path) -> None:
    committed(tmp_path, 18)
    with pytest.raises(Diverged, match="no checkpoint of step 12 or earlier"):
        rollback.record_rollback(tmp_path, None, wanted(max_step=12))
    assert rollback.read_records(tmp_path) == [] and steps(tmp_path) == [18]


def test_once_too_often_without_getting_further(tmp_path: Path) -> None:
    committed(tmp_path, 18)
    for _ in range(2):
        rollback.record_rollback(tmp_path, None, wanted())
    with pytest.raises(Diverged, match=r"rolled back 2 times since it last got past step 20"):
        rollback.record_rollback(tmp_path, None, wanted())
    committed(tmp_path, 24)
    rollback.record_rollback(tmp_path, None, wanted(last_step=30, max_step=29))
    assert [r.count for r in rollback.read_records(tmp_path)] == [1, 2, 1]
    other = tmp_path / "other"
    committed(other, 1)
    with pytest.raises(Diverged, match="max_roll_backs = 0"):
        rollback.record_rollback(other, None, wanted(max_rollbacks=0))


def test_a_record_that_does_not_read_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / rollback.RECORD_FILE).write_text('[{"last_step": ')
    with pytest.raises(CheckpointError, match="cannot be read"):
        rollback.excluded_ranges(tmp_path)

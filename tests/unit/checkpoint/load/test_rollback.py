"""The record of roll-backs: condemned checkpoints, excluded samples, and the limit on roll-backs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.checkpoint.core import retention
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import CheckpointError, Diverged, NotFound


def commit(root: Path, *steps: int, mark: str = "a") -> None:
    for step in steps:
        folder = index.step_folder(root, step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / index.COMMITTED).write_text(f"{mark}-{step}")


def steps(root: Any) -> list[int]:
    return [index.parse_step(p) or 0 for p in index.list_checkpoint_folders(root) if index.has_commit_marker(p)]


def make_target(**changes: Any) -> RollbackTarget:
    fields = {
        "last_step": 20,
        "max_step": 19,
        "reason": "a spike",
        "excluded": {"data": [[152, 160]]},
        "max_rollbacks": 2,
    }
    return RollbackTarget(**{**fields, **changes})


def test_condemned_checkpoints_stay_deleted(tmp_path: Path) -> None:
    commit(tmp_path, 6, 12, 18, 24)
    rollback.record_rollback(tmp_path, None, make_target(max_step=12))
    assert steps(tmp_path) == [6, 12, 18, 24]  # only recorded so far
    for _ in range(2):
        rollback.apply_records(tmp_path, None)
        assert steps(tmp_path) == [6, 12]
    commit(tmp_path, 18, mark="b")  # saved after the roll-back: another checkpoint
    rollback.apply_records(tmp_path, None)
    assert steps(tmp_path) == [6, 12, 18]
    assert rollback.excluded_ranges(tmp_path) == {"data": [[152, 160]]}


def test_offline_commands_ignore_condemned_checkpoints(tmp_path: Path) -> None:
    """As after a stop during the roll-back: the next attempt would delete them, but may never start."""
    commit(tmp_path, 6, 12)
    for step, value in ((12, 2.0), (18, 1.0)):
        folder = index.step_folder(tmp_path, step)
        folder.mkdir(exist_ok=True)
        fields: dict[str, Any] = {"layout": {}, "files": {}, "tensors": (), "values": {}}
        metric = index.CheckpointMetric(name="loss", value=value)
        common: dict[str, Any] = {"format": index.FORMAT_VERSION, "torch": "2", "world_size": 1, "engine": "buffered"}
        index.write_manifest(folder, index.Manifest(step=step, metric=metric, **common, **fields))
    rollback.record_rollback(tmp_path, None, make_target(max_step=12))
    assert steps(tmp_path) == [6, 12, 18]
    assert [row["step"] for row in inspect.list_checkpoints(tmp_path)] == [6, 12]
    assert inspect.find_checkpoint(tmp_path) == inspect.find_best(tmp_path) == index.step_folder(tmp_path, 12)
    with pytest.raises(NotFound, match=r"of step 18; existing steps: 6, 12$"):
        inspect.find_checkpoint(tmp_path, 18)
    # The checkpoint that the run rolls back to cannot be pruned by hand.
    assert inspect.list_prunable(tmp_path, 1, is_valid=lambda _: True) == [index.step_folder(tmp_path, 6)]
    remote = RemoteFolder(tmp_path.as_uri())  # has no record next to it
    assert index.parse_step(inspect.find_checkpoint(remote)) == 18


def test_condemned_copies_behind_url_lose_their_marker(tmp_path: Path) -> None:
    local, store = tmp_path / "local", tmp_path / "store"
    commit(local, 6, 18)
    commit(store, 6, 18)
    commit(store, 24, mark="b")
    remote = RemoteFolder(store.as_uri())
    rollback.record_rollback(local, remote, make_target())
    assert rollback.is_valid(local, index.step_folder(remote, 6), 6)
    assert rollback.is_valid(local, index.step_folder(remote, 18), 18)
    assert not rollback.is_valid(local, index.step_folder(remote, 24), 24)
    rollback.apply_records(local, remote)
    assert steps(local) == [6, 18] and steps(store) == [6, 18]


def test_roll_back_without_older_checkpoint_diverges(tmp_path: Path) -> None:
    commit(tmp_path, 18)
    with pytest.raises(Diverged, match="no checkpoint of step 12 or earlier"):
        rollback.record_rollback(tmp_path, None, make_target(max_step=12))
    assert rollback.read_records(tmp_path) == [] and steps(tmp_path) == [18]


def test_repeated_roll_back_without_progress_diverges(tmp_path: Path) -> None:
    commit(tmp_path, 18)
    for _ in range(2):
        rollback.record_rollback(tmp_path, None, make_target())
    with pytest.raises(Diverged, match=r"rolled back 2 times since it last got past step 20"):
        rollback.record_rollback(tmp_path, None, make_target())
    commit(tmp_path, 24)
    rollback.record_rollback(tmp_path, None, make_target(last_step=30, max_step=29))
    assert [r.count for r in rollback.read_records(tmp_path)] == [1, 2, 1]
    other = tmp_path / "other"
    commit(other, 1)
    with pytest.raises(Diverged, match="max_roll_backs = 0"):
        rollback.record_rollback(other, None, make_target(max_rollbacks=0))


def test_unreadable_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / rollback.RECORD_FILE).write_text('[{"last_step": ')
    with pytest.raises(CheckpointError, match="cannot be read"):
        rollback.excluded_ranges(tmp_path)


def test_special_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / rollback.RECORD_FILE).symlink_to("/dev/null")  # a FIFO would block, /dev/zero would never end
    with pytest.raises(CheckpointError, match="is a device") as caught:
        rollback.read_records(tmp_path)
    assert "delete it" in str(caught.value.fix)
    (tmp_path / index.COMMITTED).symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="is a device"):
        retention.read_marker(tmp_path)

"""Kills and file system errors at every point of a save, and folders without permission: the older checkpoint stays
valid, and the error is reported."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from clustertrain import settings
from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.core.state_dict import to_local_shard
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load.restore import RestoreResult
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save import node_local
from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.checkpoint.save.writer_jobs import WriteJob
from clustertrain.errors import CheckpointError

pytestmark = pytest.mark.long
# Fault point -> step of the second save. Only ``during_publish`` needs an existing checkpoint of the same step.
POINTS = {
    "before_write": 6,
    "during_write": 6,
    "after_write": 6,
    "after_part_done_marker": 6,
    "before_commit_marker": 6,
    "after_commit_marker": 6,
    "during_publish": 3,
    "during_prune": 6,
}
# A second writer finds the work up to this point done and does not reach the point again.
NOT_REPEATED = ("after_part_done_marker", "after_commit_marker", "during_prune")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def manager_of(root: Path, attempt: str, *, async_save: bool = False) -> CheckpointManager:
    return CheckpointManager(
        root,
        Ranks(),
        CheckpointConfig(attempt=attempt, layout={}, policy=RetentionPolicy(keep=1), async_save=async_save),
    )


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value)}


def restored_value(root: Path) -> tuple[int, float]:
    """Restore in another attempt; return the step and the value that was saved there."""
    state = state_of(-1.0)
    restored = manager_of(root, "later").restore(state)
    assert restored is not None and restored.skipped == []
    assert bool((state["weights"] == state["weights"][0]).all())
    return restored.step, float(state["weights"][0])


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


@contextmanager
def fault_at(point: str, action: str) -> Iterator[None]:
    """Set the fault for processes that start within the context."""
    os.environ[settings.FAULT_AT] = f"{point}:0:1:{action}"
    try:
        yield
    finally:
        del os.environ[settings.FAULT_AT]


@pytest.mark.parametrize("point", POINTS)
def test_writer_killed_once_loses_nothing(root: Path, point: str) -> None:
    manager_of(root, "1").save(3, state_of(1.0))
    manager = manager_of(root, "2", async_save=True)
    with fault_at(point, "KILL"):
        manager.start()
    saved = manager.save(POINTS[point], state_of(2.0), wait=True)
    manager.close()
    assert saved is not None and saved.bytes == index.read_manifest(saved.path).bytes
    # The next save deletes what this one did not.
    assert names(root) == ["step-00000003"] * (point == "during_prune") + [saved.path.name]
    assert restored_value(root) == (POINTS[point], 2.0)


@pytest.mark.parametrize("point", [p for p in POINTS if p not in NOT_REPEATED])
def test_writer_killed_twice_keeps_older_checkpoint(root: Path, point: str) -> None:
    manager_of(root, "1").save(3, state_of(1.0))
    manager = manager_of(root, "2", async_save=True)
    with (
        fault_at(point, "KILL"),
        pytest.raises(StorageError, match=rf"step {POINTS[point]} was not saved: .*was killed by SIGKILL, twice"),
    ):
        manager.save(POINTS[point], state_of(2.0), wait=True)
    manager.close()
    assert restored_value(root) == (3, 1.0)
    manager_of(root, "3").save(9, state_of(3.0))
    assert names(root) == ["step-00000009"]
    assert restored_value(root) == (9, 3.0)


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", [p for p in POINTS if p not in ("after_part_done_marker", "during_prune")])
def test_failed_save_keeps_only_the_older_checkpoint(root: Path, point: str, error: str) -> None:
    manager_of(root, "1").save(3, state_of(1.0))
    manager = manager_of(root, "2", async_save=True)
    reason = os.strerror(getattr(errno, error))
    with fault_at(point, error):
        manager.start()
    with pytest.raises(StorageError, match=rf"step {POINTS[point]} was not saved: .*{reason}") as e:
        manager.save(POINTS[point], state_of(2.0), wait=True)
    assert e.value.full is (error == "ENOSPC")
    assert names(root) == ["step-00000003"]
    inspect.verify(index.step_folder(root, 3))
    manager.save(9, state_of(3.0), wait=True)
    manager.close()
    assert names(root) == ["step-00000009"]
    assert restored_value(root) == (9, 3.0)


def test_failed_deletion_does_not_end_the_run(root: Path) -> None:
    manager_of(root, "1").save(3, state_of(1.0))
    manager = manager_of(root, "2", async_save=True)
    with fault_at("during_prune", "EIO"):
        manager.start()
    manager.save(6, state_of(2.0), wait=True)
    manager.close()
    assert names(root) == ["step-00000003", "step-00000006"]
    assert restored_value(root) == (6, 2.0)


def test_finished_part_is_not_copied_again(root: Path, tmp_path: Path) -> None:
    """A second writer, after the first was killed: rank 0 may be reading the part, and its folder may be renamed."""
    folder = index.staging_folder(root, 3, "1")
    folder.mkdir(parents=True)
    staging = StagingBuffer(tmp_path, torch.device("cpu"))
    segments = staging.stage([to_local_shard("a", "other", torch.ones(100))])
    local = str(tmp_path / "local" / "step-00000003-1")
    job = WriteJob(
        step=3,
        folder=str(folder),
        rank=0,
        engine="raw",
        buffer_index=0,
        segments=segments,
        rank_values=None,
        local_folder=local,
    )
    assert node_local.write_local_part(job, staging.memory())
    staging.close()
    job = msgspec.structs.replace(job, buffer_index=None)
    assert node_local.copy_to_shared(job) == 400
    before = (folder / "rank-0.bin").stat()
    assert node_local.copy_to_shared(job) == 400
    after = (folder / "rank-0.bin").stat()
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


def test_partial_file_of_killed_writer_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_partial_file(point: str, rank: int) -> None:
        if point == "after_write":
            (folder,) = root.iterdir()
            (folder / "..rank-0.done.4711-00c0ffee").write_text("{")

    monkeypatch.setattr(fault_points, "fault_point", leave_partial_file)
    saved = manager_of(root, "1").save(3, state_of(1.0))
    assert saved is not None
    assert sorted(p.name for p in saved.path.iterdir()) == ["COMMITTED", "manifest.json", "rank-0.bin"]
    assert list(index.read_manifest(saved.path).files) == ["rank-0.bin"]


def test_newer_format_is_not_skipped(root: Path) -> None:
    manager = CheckpointManager(root, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    for step in (3, 6):
        manager.save(step, state_of(1.0))
    marker = index.step_folder(root, 6) / index.COMMITTED
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": index.FORMAT_VERSION + 1}))
    with pytest.raises(CheckpointError, match=f"written in format {index.FORMAT_VERSION + 1}.*\n.*or a newer one"):
        manager.restore(state_of(0.0))
    assert names(root) == ["step-00000003", "step-00000006"]


def test_checkpoint_under_another_step_is_damaged(root: Path) -> None:
    """If it were restored as step 6, the run would never train on the data of steps 4 to 6."""
    manager = CheckpointManager(root, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    manager.save(3, state_of(1.0))
    shutil.copytree(index.step_folder(root, 3), index.step_folder(root, 6))
    restored = manager.restore(state_of(0.0))
    assert restored is not None and restored.step == 3
    assert "contains the checkpoint of step 3" in restored.skipped[0]["reason"]


# -- folders without permission


@pytest.fixture
def shared() -> Iterator[Path]:
    """A world-readable folder with checkpoints of steps 3 and 6, unlike the folders of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    manager = CheckpointManager(
        folder / "checkpoints", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False)
    )
    for step in (3, 6):
        manager.save(step, state_of(float(step)))
    for path in [folder / "checkpoints", *(folder / "checkpoints").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield folder / "checkpoints"
    shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def restore_as_attempt_2(root: Path) -> RestoreResult | None:
    return manager_of(root, "2").restore(state_of(0.0))


@pytest.mark.parametrize(
    "denied",
    [".", "step-00000006", "step-00000006/COMMITTED", "step-00000006/manifest.json", "step-00000006/rank-0.bin"],
)
def test_permission_error_is_neither_damage_nor_fresh_start(shared: Path, denied: str) -> None:
    (shared / denied).chmod(0)
    with as_nobody(), pytest.raises(StorageError, match="Permission denied") as e:
        restore_as_attempt_2(shared)
    assert denied.rpartition("/")[2] in str(e.value) or str(shared) in str(e.value)
    assert names(shared) == ["step-00000003", "step-00000006"]
    (shared / denied).chmod(0o755)
    restored = restore_as_attempt_2(shared)
    assert restored is not None and (restored.step, restored.skipped) == (6, [])


def test_unwritable_folder_fails_at_first_save(shared: Path) -> None:
    with as_nobody():
        restored = restore_as_attempt_2(shared)
        assert restored is not None and restored.step == 6
        with pytest.raises(
            StorageError,
            match=r"Permission denied.*checkpoints/\.step-00000009-2",
        ) as e:
            manager_of(shared, "2").save(9, state_of(9.0))
    assert e.value.full  # it would fail the same way again
    assert names(shared) == ["step-00000003", "step-00000006"]


def test_damage_in_unwritable_folder_is_an_error(shared: Path) -> None:
    os.truncate(shared / "step-00000006" / "rank-0.bin", 8)
    with as_nobody(), pytest.raises(StorageError, match="damaged checkpoints cannot be set aside"):
        restore_as_attempt_2(shared)


def test_read_only_file_system_fails_at_first_save(shared: Path) -> None:
    bind = [["mount", "--bind", str(shared), str(shared)], ["mount", "-o", "remount,ro,bind", str(shared)]]
    if os.geteuid() != 0 or any(subprocess.run(b, capture_output=True, check=False).returncode for b in bind):
        pytest.skip("only root can mount")
    try:
        restored = restore_as_attempt_2(shared)
        assert restored is not None and restored.step == 6
        with pytest.raises(StorageError, match=os.strerror(errno.EROFS)) as e:
            manager_of(shared, "2").save(9, state_of(9.0))
        assert not e.value.full  # on another node, or a minute later, it may be writable
    finally:
        subprocess.run(["umount", "--lazy", str(shared)], check=True)
    assert names(shared) == ["step-00000003", "step-00000006"]

"""Kills and failures of the file system at every point of a save's way, and folders that may not be used: the older
checkpoint stays in force, and what is wrong is said."""

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
from clustertrain.checkpoint.core.control_group import Ranks
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
# The second save replaces the first one at this point alone: it is the one at which there is something to replace.
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
# Another process finds done what was to be done up to here, and does not come to the same point again.
READY = ("after_part_done_marker", "after_commit_marker", "during_prune")


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
    """By another attempt: the step, and the value that was saved there."""
    state = state_of(-1.0)
    restored = manager_of(root, "later").restore(state)
    assert restored is not None and restored.skipped == []
    assert bool((state["weights"] == state["weights"][0]).all())
    return restored.step, float(state["weights"][0])


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


@contextmanager
def fault_at(point: str, what: str) -> Iterator[None]:
    """For the processes that are started meanwhile."""
    os.environ[settings.FAULT_AT] = f"{point}:0:1:{what}"
    try:
        yield
    finally:
        del os.environ[settings.FAULT_AT]


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_is_killed_once_costs_nothing(root: Path, point: str) -> None:
    manager_of(root, "1").save(3, state_of(1.0))
    manager = manager_of(root, "2", async_save=True)
    with fault_at(point, "KILL"):
        manager.start()
    saved = manager.save(POINTS[point], state_of(2.0), wait=True)
    manager.close()
    assert saved is not None and saved.bytes == index.read_manifest(saved.path).bytes
    # What was to be deleted goes with the next one.
    assert names(root) == ["step-00000003"] * (point == "during_prune") + [saved.path.name]
    assert restored_value(root) == (POINTS[point], 2.0)


@pytest.mark.parametrize("point", [p for p in POINTS if p not in READY])
def test_a_writer_that_is_killed_twice_leaves_the_older_checkpoint(root: Path, point: str) -> None:
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


@pytest.mark.parametrize("what", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", [p for p in POINTS if p not in ("after_part_done_marker", "during_prune")])
def test_a_failed_save_leaves_what_was_there_and_nothing_else(root: Path, point: str, what: str) -> None:
    manager_of(root, "1").save(3, state_of(1.0))
    manager = manager_of(root, "2", async_save=True)
    said = os.strerror(getattr(errno, what))
    with fault_at(point, what):
        manager.start()
    with pytest.raises(StorageError, match=rf"step {POINTS[point]} was not saved: .*{said}") as e:
        manager.save(POINTS[point], state_of(2.0), wait=True)
    assert e.value.full is (what == "ENOSPC")
    assert names(root) == ["step-00000003"]
    inspect.verify(index.step_folder(root, 3))
    manager.save(9, state_of(3.0), wait=True)
    manager.close()
    assert names(root) == ["step-00000009"]
    assert restored_value(root) == (9, 3.0)


def test_old_checkpoints_that_cannot_be_deleted_do_not_end_the_run(root: Path) -> None:
    manager_of(root, "1").save(3, state_of(1.0))
    manager = manager_of(root, "2", async_save=True)
    with fault_at("during_prune", "EIO"):
        manager.start()
    manager.save(6, state_of(2.0), wait=True)
    manager.close()
    assert names(root) == ["step-00000003", "step-00000006"]
    assert restored_value(root) == (6, 2.0)


def test_a_part_from_the_nodes_own_disk_is_not_touched_when_it_was_handed_in(root: Path, tmp_path: Path) -> None:
    """By another writer, after the first was killed: rank 0 may be reading it, and its folder may have its name."""
    folder = index.staging_folder(root, 3, "1")
    folder.mkdir(parents=True)
    staging = StagingBuffer(tmp_path, torch.device("cpu"))
    segments = staging.stage([to_local_shard("a", "other", torch.ones(100))])
    near = str(tmp_path / "near" / "step-00000003-1")
    job = WriteJob(
        step=3,
        folder=str(folder),
        rank=0,
        engine="raw",
        buffer_index=0,
        segments=segments,
        rank_values=None,
        local_folder=near,
    )
    assert node_local.write_local_part(job, staging.memory())
    staging.close()
    job = msgspec.structs.replace(job, buffer_index=None)
    assert node_local.copy_to_shared(job) == 400
    before = (folder / "rank-0.bin").stat()
    assert node_local.copy_to_shared(job) == 400
    after = (folder / "rank-0.bin").stat()
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


def test_half_a_file_of_a_killed_writer_is_no_part_of_the_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_half_way(point: str, rank: int) -> None:
        if point == "after_write":
            (folder,) = root.iterdir()
            (folder / "..rank-0.done.4711-00c0ffee").write_text("{")

    monkeypatch.setattr(fault_points, "fault_point", die_half_way)
    saved = manager_of(root, "1").save(3, state_of(1.0))
    assert saved is not None
    assert sorted(p.name for p in saved.path.iterdir()) == ["COMMITTED", "manifest.json", "rank-0.bin"]
    assert list(index.read_manifest(saved.path).files) == ["rank-0.bin"]


def test_a_newer_format_is_no_reason_to_go_back(root: Path) -> None:
    manager = CheckpointManager(root, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    for step in (3, 6):
        manager.save(step, state_of(1.0))
    marker = index.step_folder(root, 6) / index.COMMITTED
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": index.FORMAT_VERSION + 1}))
    with pytest.raises(CheckpointError, match=f"written in format {index.FORMAT_VERSION + 1}.*\n.*or a newer one"):
        manager.restore(state_of(0.0))
    assert names(root) == ["step-00000003", "step-00000006"]


def test_a_checkpoint_under_another_steps_name_is_damaged(root: Path) -> None:
    """Restored as step 6, the run would do the data of steps 4 to 6 never."""
    manager = CheckpointManager(root, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    manager.save(3, state_of(1.0))
    shutil.copytree(index.step_folder(root, 3), index.step_folder(root, 6))
    restored = manager.restore(state_of(0.0))
    assert restored is not None and restored.step == 3
    assert "contains the checkpoint of step 3" in restored.skipped[0]["reason"]


# -- folders that may not be used


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of checkpoints of steps 3 and 6 that everybody can get to, unlike pytest's own."""
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
        pytest.skip("only root can become somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def restored_by(root: Path) -> RestoreResult | None:
    return manager_of(root, "2").restore(state_of(0.0))


@pytest.mark.parametrize(
    "denied",
    [".", "step-00000006", "step-00000006/COMMITTED", "step-00000006/manifest.json", "step-00000006/rank-0.bin"],
)
def test_what_may_not_be_read_is_no_damage_and_no_new_beginning(shared: Path, denied: str) -> None:
    (shared / denied).chmod(0)
    with as_nobody(), pytest.raises(StorageError, match="Permission denied") as e:
        restored_by(shared)
    assert denied.rpartition("/")[2] in str(e.value) or str(shared) in str(e.value)
    assert names(shared) == ["step-00000003", "step-00000006"]
    (shared / denied).chmod(0o755)
    restored = restored_by(shared)
    assert restored is not None and (restored.step, restored.skipped) == (6, [])


def test_a_folder_that_may_not_be_written_is_told_at_the_first_save(shared: Path) -> None:
    with as_nobody():
        restored = restored_by(shared)
        assert restored is not None and restored.step == 6
        with pytest.raises(
            StorageError,
            match=r"Permission denied.*checkpoints/\.step-00000009-2",
        ) as e:
            manager_of(shared, "2").save(9, state_of(9.0))
    assert e.value.full  # it would fail the same way again
    assert names(shared) == ["step-00000003", "step-00000006"]


def test_damage_in_a_folder_that_may_not_be_written_is_passed_over(shared: Path) -> None:
    os.truncate(shared / "step-00000006" / "rank-0.bin", 8)
    with as_nobody(), pytest.raises(StorageError, match="damaged checkpoints cannot be set aside"):
        restored_by(shared)


def test_a_file_system_that_has_become_read_only_is_told_at_the_first_save(shared: Path) -> None:
    bind = [["mount", "--bind", str(shared), str(shared)], ["mount", "-o", "remount,ro,bind", str(shared)]]
    if os.geteuid() != 0 or any(subprocess.run(b, capture_output=True, check=False).returncode for b in bind):
        pytest.skip("only root can mount")
    try:
        restored = restored_by(shared)
        assert restored is not None and restored.step == 6
        with pytest.raises(StorageError, match=os.strerror(errno.EROFS)) as e:
            manager_of(shared, "2").save(9, state_of(9.0))
        assert not e.value.full  # on another node, or a minute later, it may be writable
    finally:
        subprocess.run(["umount", "--lazy", str(shared)], check=True)
    assert names(shared) == ["step-00000003", "step-00000006"]

"""The node's local disk: it frees memory sooner and speeds up a restore, and its failure loses nothing."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from clustertrain import settings
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format import storage_errors
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load.restore import LocalTier, RestoreResult
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save import node_local
from clustertrain.checkpoint.save.writer_client import WriterClient
from clustertrain.checkpoint.save.writer_jobs import WriteJob

# The writer processes of the other two engines import torch.
pytestmark = pytest.mark.long
SLOW = [pytest.param(name, marks=pytest.mark.ranks) for name in ("dcp", "torchsnapshot")]
ENGINES = ["raw", *SLOW]
ELEMENTS = 2_500_000  # three blocks


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((ELEMENTS,), value), "note": value}


@pytest.fixture
def local_disk(tmp_path: Path) -> Path:
    return tmp_path / "node disk" / "run-1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def make(root: Path, local_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CheckpointManager]]:
    """Return a function that makes a manager whose writer process meets ``fault``."""
    managers = []

    def make(*, fault: str = "", **changes: Any) -> CheckpointManager:
        options: dict[str, Any] = {"attempt": "1", "layout": {}, "local": LocalTier(local_disk, True), **changes}
        manager = CheckpointManager(root, Ranks(), CheckpointConfig(**options))
        if fault:
            monkeypatch.setenv(settings.FAULT_AT, fault)
        manager.start()
        monkeypatch.delenv(settings.FAULT_AT, raising=False)
        managers.append(manager)
        return manager

    yield make
    for manager in managers:
        manager.close()


def find_local_folder(local_disk: Path, step: int) -> Path:
    (folder,) = local_disk.glob(f"step-{step:08d}-*")
    return folder


def list_saves(local_disk: Path) -> list[str]:
    """Return the step and attempt in the names of the local folders."""
    return sorted(p.name.rpartition("-")[0] for p in local_disk.iterdir())


def restore_and_check(root: Path, local_disk: Path | None, step: int) -> RestoreResult:
    """Restore in a later attempt, check all values, and return the result."""
    state = state_of(-1.0)
    result = CheckpointManager(
        root, Ranks(), CheckpointConfig(attempt="9", layout={}, async_save=False, local=LocalTier(local_disk, True))
    ).restore(state)
    assert result is not None and result.step == step and result.skipped == []
    assert bool((state["weights"] == float(step)).all()) and state["note"] == float(step)
    return result


@pytest.mark.parametrize("engine", ENGINES)
def test_restore_on_same_node_reads_only_the_local_disk(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path, engine: str
) -> None:
    manager = make(engine=engine)
    for step in (3, 6, 9):
        manager.save(step, state_of(float(step)))
    manager.wait_for_saves()
    inspect.verify(index.step_folder(root, 9))
    assert list_saves(local_disk) == ["step-00000006-1", "step-00000009-1"]
    for name in index.read_manifest(index.step_folder(root, 9)).files:
        shared, local = root / "step-00000009" / name, find_local_folder(local_disk, 9) / name
        if local.exists():
            assert local.read_bytes() == shared.read_bytes()
            shared.write_bytes(bytes(shared.stat().st_size))  # a read from the shared folder would not verify
    result = restore_and_check(root, local_disk, 9)
    assert result.from_local == 4 * ELEMENTS
    assert list_saves(local_disk) == ["step-00000009-1"]  # older ones cannot be restored anymore


def test_frozen_files_are_linked_in_the_shared_folder(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path
) -> None:
    name, frozen = "rank-0.frozen-0.bin", torch.nn.Linear(ELEMENTS // 2, 1, bias=False).requires_grad_(False)
    manager = make()
    for step in (3, 6):
        manager.save(step, {"frozen": frozen, "trained": torch.full((9,), float(step))})
        manager.wait_for_saves()
    manager.save(9, {"frozen": frozen, "trained": torch.full((9,), 9.0)}, wait=True)  # without the local disk
    assert len({(index.step_folder(root, s) / name).stat().st_ino for s in (3, 6, 9)}) == 1
    assert (find_local_folder(local_disk, 6) / name).read_bytes() == (root / "step-00000006" / name).read_bytes()
    manager.save(12, {"frozen": frozen, "trained": torch.full((9,), 12.0)})
    saved = manager.wait_for_saves()
    assert saved is not None and saved.written < saved.bytes / 100
    loaded = torch.nn.Linear(ELEMENTS // 2, 1, bias=False)
    config = CheckpointConfig(attempt="9", layout={}, async_save=False, local=LocalTier(local_disk, True))
    restored = CheckpointManager(root, Ranks(), config).restore({"frozen": loaded, "trained": torch.zeros(9)})
    assert restored is not None and restored.step == 12 and restored.from_local == saved.bytes
    assert torch.equal(loaded.weight, frozen.weight)


def test_memory_is_free_before_copy_to_shared_folder(make: Callable[..., CheckpointManager], root: Path) -> None:
    root.mkdir()
    manager = make()
    writer = _writer(manager)
    writer.suspend()
    manager.save(3, state_of(3.0))
    folder = next(root.glob(".step-00000003-1*"))
    folder.rmdir()
    folder.touch()  # makes the copy fail
    writer.resume()
    manager._pending.wait_until(manager._pending.waiting[0], lambda: manager._pending.waiting[0].is_in_local_tier)
    manager.save(6, state_of(6.0))  # in the same memory
    assert len(manager._pending.waiting) == 2
    with pytest.raises(StorageError, match="step 3 was not saved"):
        manager.wait_for_saves()
    manager.wait_for_saves()
    folder.unlink(missing_ok=True)
    restore_and_check(root, None, 6)


def _writer(manager: CheckpointManager) -> psutil.Process:
    assert isinstance(manager._pending.worker, WriterClient) and manager._pending.worker._process is not None
    return psutil.Process(manager._pending.worker._process.pid)


def test_third_save_waits_for_the_first(make: Callable[..., CheckpointManager], root: Path) -> None:
    manager = make()
    writer = _writer(manager)
    manager.save(3, state_of(3.0))
    manager._pending.wait_until(manager._pending.waiting[0], lambda: manager._pending.waiting[0].is_in_local_tier)
    writer.suspend()
    manager.save(6, state_of(6.0))
    third = threading.Thread(target=manager.save, args=(9, state_of(9.0)))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    writer.resume()
    third.join()
    manager.wait_for_saves()
    assert [r["verified"] for r in inspect.list_checkpoints(root, verify=True)] == [True] * 3


POINTS = ["during_write", "after_local_write", "during_copy_to_shared", "after_write", "before_commit_marker"]


@pytest.mark.parametrize(
    ("point", "engine"),
    [
        *((p, "raw") for p in POINTS),
        *(pytest.param("during_copy_to_shared", e, marks=pytest.mark.ranks) for e in ("dcp", "torchsnapshot")),
    ],
)
def test_replacement_writer_continues_between_tiers(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path, point: str, engine: str
) -> None:
    manager = make(fault=f"{point}:0:1:KILL", engine=engine)
    manager.save(3, state_of(3.0))
    if point == "during_copy_to_shared":  # another save uses the memory of the first by then
        manager.save(6, state_of(6.0))
    manager.wait_for_saves()
    manager.save(9, state_of(9.0), wait=True)
    assert [r["verified"] for r in inspect.list_checkpoints(root, verify=True)] == [True] * len(
        index.list_checkpoint_folders(root)
    )
    assert not [p for p in root.iterdir() if p.name.startswith(".")]
    restore_and_check(root, local_disk, 9)
    assert inspect.verify(index.step_folder(root, 3)).step == 3


def test_stop_writes_directly_to_shared_folder(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path
) -> None:
    manager = make()
    manager.save(3, state_of(3.0), reason="stop", wait=True)
    assert not local_disk.exists()
    assert restore_and_check(root, local_disk, 3).from_local == 0


def test_full_local_disk_only_warns(
    make: Callable[..., CheckpointManager], root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    # Space for one and a half checkpoints.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=15m", "tmpfs", str(disk)], check=True)
    try:
        manager = make(local=LocalTier(disk / "run-1", True))
        for step in (3, 6, 9):
            manager.save(step, state_of(float(step)))
            manager.wait_for_saves()
        assert list_saves(disk / "run-1") == ["step-00000009-1"]  # the older one was deleted for space
        shutil.rmtree(find_local_folder(disk / "run-1", 9))
        (disk / "other").write_bytes(bytes(6 << 20))
        for step in (12, 15):
            manager.save(step, state_of(float(step)))
            manager.wait_for_saves()
        assert [str(f) for f in (disk / "run-1").rglob("rank-*")] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert capfd.readouterr().err.count("No space left on device") == 1
    restore_and_check(root, None, 15)


@pytest.mark.parametrize("obstacle", ["file", "folder of another user", "link"])
def test_unsafe_local_folder_is_not_used(
    make: Callable[..., CheckpointManager],
    root: Path,
    local_disk: Path,
    obstacle: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if obstacle == "file":
        local_disk.parent.write_text("x")
    elif obstacle == "link":
        local_disk.parent.mkdir()
        (local_disk.parent / "target").mkdir()
        local_disk.symlink_to(local_disk.parent / "target")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        local_disk.mkdir(parents=True)
        os.chown(local_disk, 12345, 12345)
    manager = make()
    manager.save(3, state_of(3.0))
    manager.wait_for_saves()
    assert "go straight to the shared folder" in capfd.readouterr().err
    assert not [p for p in local_disk.parent.parent.rglob("*") if "node disk" in str(p) and p.name.startswith("rank-")]
    restore_and_check(root, None, 3)


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: _flip(path, 9_000_000),
        lambda path: os.truncate(path, 5_000_000),
        lambda path: path.unlink(),
        lambda path: path.parent.rename(path.parent.with_name("step-00000006-1-another")),
    ],
    ids=["flipped", "truncated", "missing", "of another save"],
)
def test_local_damage_is_repaired_from_shared_folder(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path, damage: Any
) -> None:
    manager = make()
    manager.save(3, state_of(3.0))
    manager.wait_for_saves()
    manager.save(6, state_of(6.0))
    manager.wait_for_saves()
    damage(find_local_folder(local_disk, 6) / "rank-0.bin")
    result = restore_and_check(root, local_disk, 6)
    assert result.from_local is not None and result.from_local < 4 * ELEMENTS


def test_unresponsive_local_disk_is_tried_once(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    manager.save(3, state_of(3.0))
    manager.wait_for_saves()
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)
    original, reads = node_local.read_into, []

    def fail(into: memoryview, folder: Path, shard: Any, low: int, *, alone: bool) -> None:
        reads.append(folder)
        raise StorageError(f"{folder}: Input/output error")

    monkeypatch.setattr(node_local, "read_into", fail)
    assert restore_and_check(root, local_disk, 3).from_local == 0
    assert len(reads) == 1
    assert node_local.read_into is not original


def test_corrupted_local_part_is_not_copied(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path
) -> None:
    manager = make(fault="after_local_write:0:1:KILL")
    writer = _writer(manager)
    manager.save(3, state_of(3.0))
    writer.wait(60.0)
    _flip(find_local_folder(local_disk, 3) / "rank-0.bin", 100)
    # The killed writer did not report that the memory is free, so the part is written from memory again.
    manager.wait_for_saves()
    restore_and_check(root, None, 3)
    job = WriteJob(
        step=3, folder=str(root / "x"), rank=0, engine="raw", buffer_index=None, segments=[], rank_values=None,
        local_folder=str(find_local_folder(local_disk, 3)),
    )  # fmt: skip
    (root / "x").mkdir()
    assert node_local.copy_to_shared(job) == 4 * ELEMENTS
    shutil.rmtree(root / "x")
    (root / "x").mkdir()
    _flip(find_local_folder(local_disk, 3) / "rank-0.bin", 100)
    with pytest.raises(StorageError, match=r"rank-0\.bin: checksum of bytes 0 to 4194304 differs"):
        node_local.copy_to_shared(job)
    assert list((root / "x").iterdir()) == []


def test_local_leftovers_are_removed_on_restore_and_finish(
    make: Callable[..., CheckpointManager], root: Path, local_disk: Path
) -> None:
    manager = make()
    for step in (3, 6):
        manager.save(step, state_of(float(step)))
    manager.wait_for_saves()
    manager.close()
    (local_disk / "step-00000012-1-x").mkdir()  # from a save that was never committed
    (local_disk / "other").mkdir()
    second = make(attempt="2")
    state = state_of(0.0)
    assert second.restore(state) is not None
    assert list_saves(local_disk) == ["", "step-00000006-1"]
    for step in (9, 12):
        second.save(step, state_of(float(step)))
    second.wait_for_saves()
    assert list_saves(local_disk) == ["", "step-00000009-2", "step-00000012-2"]
    second.close(run_finished=True)
    assert not local_disk.exists()


def test_ranks_of_a_node_delete_only_their_own_files(tmp_path: Path, caplog: Any) -> None:
    local_disk, folder = tmp_path / "local_disk", tmp_path / "shared"
    folder.mkdir()
    memory = memoryview(bytearray(8))

    def job(step: int, rank: int) -> WriteJob:
        return WriteJob(
            step=step, folder=str(folder), rank=rank, engine="raw", buffer_index=0, segments=[], rank_values=rank,
            local_folder=str(node_local.local_folder(local_disk, f".step-{step:08d}-1")),
        )  # fmt: skip

    with caplog.at_level(logging.WARNING):
        assert all(node_local.write_local_part(job(step, rank), memory) for step in (3, 6, 9) for rank in (0, 1))
        assert node_local.write_local_part(
            job(12, 0), memory, in_use={str(node_local.local_folder(local_disk, ".step-00000003-1"))}
        )
    assert caplog.records == []
    files = {str(p.relative_to(local_disk)) for p in local_disk.rglob("*.bin")}
    assert files == {f"step-0000000{s}-1/rank-{r}.bin" for s, r in ((6, 1), (9, 0), (9, 1))} | {
        "step-00000012-1/rank-0.bin"
    }

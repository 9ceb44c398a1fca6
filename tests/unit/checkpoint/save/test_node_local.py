"""The node's own disk: it frees memory and speeds up a restore, and nothing is lost where it fails."""

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
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format import storage_errors
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load.restore import LocalTier, RestoreResult
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save import node_local
from clustertrain.checkpoint.save.writer_client import WriterClient
from clustertrain.checkpoint.save.writer_jobs import WriteJob

# Processes that write for the other two import torch.
pytestmark = pytest.mark.long
SLOW = [pytest.param(name, marks=pytest.mark.ranks) for name in ("dcp", "torchsnapshot")]
ENGINES = ["raw", *SLOW]
ELEMENTS = 2_500_000  # three blocks


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((ELEMENTS,), value), "note": value}


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "node disk" / "run-1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def make(root: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CheckpointManager]]:
    """A manager with a process that writes, which meets ``fault``."""
    made = []

    def make(*, fault: str = "", **more: Any) -> CheckpointManager:
        options: dict[str, Any] = {"attempt": "1", "layout": {}, "local": LocalTier(near, True), **more}
        manager = CheckpointManager(root, Ranks(), CheckpointConfig(**options))
        if fault:
            monkeypatch.setenv(settings.FAULT_AT, fault)
        manager.start()
        monkeypatch.delenv(settings.FAULT_AT, raising=False)
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


def of_step(near: Path, step: int) -> Path:
    (found,) = near.glob(f"step-{step:08d}-*")
    return found


def saves(near: Path) -> list[str]:
    """Step and attempt of the folders there."""
    return sorted(p.name.rpartition("-")[0] for p in near.iterdir())


def restored(root: Path, near: Path | None, step: int) -> RestoreResult:
    """What a later attempt reads; it must be what was saved, all of it."""
    state = state_of(-1.0)
    found = CheckpointManager(
        root, Ranks(), CheckpointConfig(attempt="9", layout={}, async_save=False, local=LocalTier(near, True))
    ).restore(state)
    assert found is not None and found.step == step and found.skipped == []
    assert bool((state["weights"] == float(step)).all()) and state["note"] == float(step)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_restore_on_the_same_node_reads_nothing_of_the_shared_folder(
    make: Callable[..., CheckpointManager], root: Path, near: Path, engine: str
) -> None:
    manager = make(engine=engine)
    for step in (3, 6, 9):
        manager.save(step, state_of(float(step)))
    manager.wait_for_saves()
    inspect.verify(index.step_folder(root, 9))
    assert saves(near) == ["step-00000006-1", "step-00000009-1"]
    for name in index.read_manifest(index.step_folder(root, 9)).files:
        there, here = root / "step-00000009" / name, of_step(near, 9) / name
        if here.exists():
            assert here.read_bytes() == there.read_bytes()
            there.write_bytes(bytes(there.stat().st_size))  # what is read of it would not verify
    found = restored(root, near, 9)
    assert found.from_local == 4 * ELEMENTS
    assert saves(near) == ["step-00000009-1"]  # nothing else can be restored


def test_memory_is_free_before_the_shared_folder_has_the_part(
    make: Callable[..., CheckpointManager], root: Path
) -> None:
    root.mkdir()
    manager = make()
    writer = _writer(manager)
    writer.suspend()
    manager.save(3, state_of(3.0))
    folder = next(root.glob(".step-00000003-1*"))
    folder.rmdir()
    folder.touch()  # the copy fails, when it comes to that
    writer.resume()
    manager._pending.wait_until(manager._pending.waiting[0], lambda: manager._pending.waiting[0].is_in_local_tier)
    manager.save(6, state_of(6.0))  # into the same memory
    assert len(manager._pending.waiting) == 2
    with pytest.raises(StorageError, match="step 3 was not saved"):
        manager.wait_for_saves()
    manager.wait_for_saves()
    folder.unlink(missing_ok=True)
    restored(root, None, 6)


def _writer(manager: CheckpointManager) -> psutil.Process:
    assert isinstance(manager._pending.worker, WriterClient) and manager._pending.worker._process is not None
    return psutil.Process(manager._pending.worker._process.pid)


def test_a_third_save_waits_for_the_first(make: Callable[..., CheckpointManager], root: Path) -> None:
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
def test_another_writer_goes_on_between_the_tiers(
    make: Callable[..., CheckpointManager], root: Path, near: Path, point: str, engine: str
) -> None:
    manager = make(fault=f"{point}:0:1:KILL", engine=engine)
    manager.save(3, state_of(3.0))
    if point == "during_copy_to_shared":  # the first one's memory is another's by then
        manager.save(6, state_of(6.0))
    manager.wait_for_saves()
    manager.save(9, state_of(9.0), wait=True)
    assert [r["verified"] for r in inspect.list_checkpoints(root, verify=True)] == [True] * len(
        index.list_checkpoint_folders(root)
    )
    assert not [p for p in root.iterdir() if p.name.startswith(".")]
    restored(root, near, 9)
    assert inspect.verify(index.step_folder(root, 3)).step == 3


def test_a_stop_writes_to_the_shared_folder_at_once(
    make: Callable[..., CheckpointManager], root: Path, near: Path
) -> None:
    manager = make()
    manager.save(3, state_of(3.0), reason="stop", wait=True)
    assert not near.exists()
    assert restored(root, near, 3).from_local == 0


def test_a_full_disk_of_the_node_costs_nothing_but_a_warning(
    make: Callable[..., CheckpointManager], root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    # Room for one and a half.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=15m", "tmpfs", str(disk)], check=True)
    try:
        manager = make(local=LocalTier(disk / "run-1", True))
        for step in (3, 6, 9):
            manager.save(step, state_of(float(step)))
            manager.wait_for_saves()
        assert saves(disk / "run-1") == ["step-00000009-1"]  # the older one made room
        shutil.rmtree(of_step(disk / "run-1", 9))
        (disk / "other").write_bytes(bytes(6 << 20))
        for step in (12, 15):
            manager.save(step, state_of(float(step)))
            manager.wait_for_saves()
        assert [str(f) for f in (disk / "run-1").rglob("rank-*")] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert capfd.readouterr().err.count("No space left on device") == 1
    restored(root, None, 15)


@pytest.mark.parametrize("what", ["a file", "another user's", "a link"])
def test_what_is_no_folder_of_ones_own_is_not_used(
    make: Callable[..., CheckpointManager], root: Path, near: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if what == "a file":
        near.parent.write_text("x")
    elif what == "a link":
        near.parent.mkdir()
        (near.parent / "target").mkdir()
        near.symlink_to(near.parent / "target")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        near.mkdir(parents=True)
        os.chown(near, 12345, 12345)
    manager = make()
    manager.save(3, state_of(3.0))
    manager.wait_for_saves()
    assert "go straight to the shared folder" in capfd.readouterr().err
    assert not [p for p in near.parent.parent.rglob("*") if "node disk" in str(p) and p.name.startswith("rank-")]
    restored(root, None, 3)


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
def test_damage_there_is_healed_from_the_shared_folder(
    make: Callable[..., CheckpointManager], root: Path, near: Path, damage: Any
) -> None:
    manager = make()
    manager.save(3, state_of(3.0))
    manager.wait_for_saves()
    manager.save(6, state_of(6.0))
    manager.wait_for_saves()
    damage(of_step(near, 6) / "rank-0.bin")
    found = restored(root, near, 6)
    assert found.from_local is not None and found.from_local < 4 * ELEMENTS


def test_a_disk_that_does_not_answer_is_not_waited_for_again_and_again(
    make: Callable[..., CheckpointManager], root: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    manager.save(3, state_of(3.0))
    manager.wait_for_saves()
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)
    original, asked = node_local.read_into, []

    def fail(into: memoryview, folder: Path, shard: Any, low: int, *, alone: bool) -> None:
        asked.append(folder)
        raise StorageError(f"{folder}: Input/output error")

    monkeypatch.setattr(node_local, "read_into", fail)
    assert restored(root, near, 3).from_local == 0
    assert len(asked) == 1
    assert node_local.read_into is not original


def test_a_part_that_the_disk_garbles_is_not_handed_on(
    make: Callable[..., CheckpointManager], root: Path, near: Path
) -> None:
    manager = make(fault="after_local_write:0:1:KILL")
    writer = _writer(manager)
    manager.save(3, state_of(3.0))
    writer.wait(60.0)
    _flip(of_step(near, 3) / "rank-0.bin", 100)
    # What was killed has not said that the memory is free, so this part comes from there again.
    manager.wait_for_saves()
    restored(root, None, 3)
    job = WriteJob(
        step=3, folder=str(root / "x"), rank=0, engine="raw", buffer_index=None, segments=[], rank_values=None,
        local_folder=str(of_step(near, 3)),
    )  # fmt: skip
    (root / "x").mkdir()
    assert node_local.copy_to_shared(job) == 4 * ELEMENTS
    shutil.rmtree(root / "x")
    (root / "x").mkdir()
    _flip(of_step(near, 3) / "rank-0.bin", 100)
    with pytest.raises(StorageError, match=r"rank-0\.bin: checksum of bytes 0 to 4194304 differs"):
        node_local.copy_to_shared(job)
    assert list((root / "x").iterdir()) == []


def test_what_other_attempts_left_goes_and_the_run_takes_its_own_along(
    make: Callable[..., CheckpointManager], root: Path, near: Path
) -> None:
    manager = make()
    for step in (3, 6):
        manager.save(step, state_of(float(step)))
    manager.wait_for_saves()
    manager.close()
    (near / "step-00000012-1-x").mkdir()  # of a save that was never committed
    (near / "else").mkdir()
    second = make(attempt="2")
    state = state_of(0.0)
    assert second.restore(state) is not None
    assert saves(near) == ["", "step-00000006-1"]
    for step in (9, 12):
        second.save(step, state_of(float(step)))
    second.wait_for_saves()
    assert saves(near) == ["", "step-00000009-2", "step-00000012-2"]
    second.close(run_finished=True)
    assert not near.exists()


def test_ranks_of_a_node_share_it_and_touch_their_own_files_alone(tmp_path: Path, caplog: Any) -> None:
    near, folder = tmp_path / "near", tmp_path / "shared"
    folder.mkdir()
    memory = memoryview(bytearray(8))

    def job(step: int, rank: int) -> WriteJob:
        return WriteJob(
            step=step, folder=str(folder), rank=rank, engine="raw", buffer_index=0, segments=[], rank_values=rank,
            local_folder=str(node_local.local_folder(near, f".step-{step:08d}-1")),
        )  # fmt: skip

    with caplog.at_level(logging.WARNING):
        assert all(node_local.write_local_part(job(step, rank), memory) for step in (3, 6, 9) for rank in (0, 1))
        assert node_local.write_local_part(
            job(12, 0), memory, in_use={str(node_local.local_folder(near, ".step-00000003-1"))}
        )
    assert caplog.records == []
    found = {str(p.relative_to(near)) for p in near.rglob("*.bin")}
    assert found == {f"step-0000000{s}-1/rank-{r}.bin" for s, r in ((6, 1), (9, 0), (9, 1))} | {
        "step-00000012-1/rank-0.bin"
    }

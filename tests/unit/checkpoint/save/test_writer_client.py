"""Saves in the background: the writer process, its failures and its replacement."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from clustertrain import clock, settings
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import to_local_shard
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint
from clustertrain.checkpoint.format.shard_io import read_into
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager, SaveResult
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save import staging
from clustertrain.checkpoint.save.staging import StagingBuffer, available_memory
from clustertrain.checkpoint.save.writer_client import WriterClient

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


@pytest.fixture
def results() -> list[SaveResult]:
    return []


@pytest.fixture
def manager(tmp_path: Path, results: list[SaveResult]) -> Iterator[CheckpointManager]:
    manager = CheckpointManager(
        tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}), on_commit=results.append
    )
    manager.start()
    yield manager
    manager.close()


def writer_of(manager: CheckpointManager) -> psutil.Process:
    worker = manager._pending.worker
    assert isinstance(worker, WriterClient) and worker._process is not None
    return psutil.Process(worker._process.pid)


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value), "note": value}


def saved_value(root: Path, step: int) -> float:
    state = state_of(-1.0)
    reader = CheckpointManager(root, Ranks(), CheckpointConfig(attempt="9", layout={}, async_save=False))
    restored = reader.restore(state)
    assert restored is not None and restored.step == step
    assert bool((state["weights"] == state["weights"][0]).all())
    return float(state["weights"][0])


def test_save_returns_before_write_and_ignores_later_changes(
    manager: CheckpointManager, results: list[SaveResult], tmp_path: Path
) -> None:
    state = state_of(1.0)
    writer = writer_of(manager)
    writer.suspend()
    assert manager.save(3, state) is None
    state["weights"].fill_(2.0)
    assert not manager.poll()
    assert inspect.list_checkpoints(tmp_path / "c") == [] and results == []
    writer.resume()
    assert clock.wait_until(lambda: (manager.poll(), results)[1] != [], 60.0)  # without a wait for the save
    assert [s.step for s in results] == [3]
    assert results[0].stall_s < results[0].save_s
    manager.wait_for_saves()
    assert [s.step for s in results] == [3]  # reported once
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_next_save_waits_for_staging_memory(manager: CheckpointManager, tmp_path: Path) -> None:
    state = state_of(1.0)
    writer = writer_of(manager)
    writer.suspend()
    manager.save(3, state)
    second = threading.Thread(target=manager.save, args=(6, state_of(2.0)))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    writer.resume()
    second.join()
    manager.wait_for_saves()
    inspect.verify(index.step_folder(tmp_path / "c", 3))
    assert saved_value(tmp_path / "c", 6) == 2.0


@pytest.fixture
def limited(tmp_path: Path, results: list[SaveResult]) -> Iterator[tuple[CheckpointManager, list[float]]]:
    """A manager, and a list into which a test puts the deadline for waits."""
    deadline: list[float] = []
    manager = CheckpointManager(
        tmp_path / "c",
        Ranks(),
        CheckpointConfig(attempt="1", layout={}),
        get_save_deadline=lambda: deadline[0] if deadline else None,
        on_commit=results.append,
    )
    manager.start()
    yield manager, deadline
    manager.close()


def test_save_is_abandoned_at_deadline(
    limited: tuple[CheckpointManager, list[float]], results: list[SaveResult], tmp_path: Path
) -> None:
    manager, deadline = limited
    manager.save(3, state_of(1.0), wait=True)
    writer = writer_of(manager)
    writer.suspend()
    deadline.append(clock.monotonic() + 0.2)
    with pytest.raises(DeadlineExceeded, match=r"step 6 was not saved: rank 0: .*before this process must end"):
        manager.save(6, state_of(2.0), wait=True)
    assert [s.step for s in results] == [3]
    assert saved_value(tmp_path / "c", 3) == 1.0  # the restore also removes the staging folder of step 6
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000003"]
    writer.resume()


@pytest.mark.long
@pytest.mark.parametrize("point", ["before_commit_marker", "during_publish", "during_prune"])
def test_deadline_during_commit(
    limited: tuple[CheckpointManager, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    manager, deadline = limited
    manager.save(3, state_of(1.0), wait=True)
    manager._pending.worker.close()
    monkeypatch.setenv(settings.FAULT_AT, f"{point}:0:1:STOP")  # for the next writer
    deadline.append(clock.monotonic() + 0.5)
    with pytest.raises(DeadlineExceeded, match="step 6 was not saved"):
        manager.save(6, state_of(2.0), wait=True)
    hung = writer_of(manager)
    assert clock.wait_until(lambda: hung.status() == psutil.STATUS_STOPPED, 10.0)
    manager.close(20.0)  # does not wait again
    step, value = (6, 2.0) if point == "during_prune" else (3, 1.0)
    assert saved_value(tmp_path / "c", step) == value
    hung.kill()


def test_folder_recreated_by_late_writer_is_removed(manager: CheckpointManager, tmp_path: Path) -> None:
    """Its save was swept before: engines based on libraries create the folder again."""
    root = tmp_path / "c"
    manager.save(3, state_of(1.0), wait=True)
    for name in (".step-00000006-1-abcd", ".swept.step-00000006-1-abcd"):
        (root / name).mkdir()
        (root / name / "rank-0.bin").write_bytes(b"late")
    assert saved_value(root, 3) == 1.0
    assert [p.name for p in root.iterdir()] == ["step-00000003"]
    folders.discard(root / "nothing there")
    for name in (".step-00000009-1-abcd", ".swept.step-00000009-1-abcd"):
        (root / name).mkdir()
        (root / name / "rank-0.bin").write_bytes(b"late")
    folders.discard(root / ".step-00000009-1-abcd")
    assert [p.name for p in root.iterdir()] == ["step-00000003"]


def test_killed_writer_is_replaced_without_loss(
    manager: CheckpointManager, results: list[SaveResult], tmp_path: Path
) -> None:
    writer = writer_of(manager)
    writer.suspend()
    manager.save(3, state_of(1.0))
    writer.kill()
    manager.wait_for_saves()
    assert writer_of(manager).pid != writer.pid
    assert saved_value(tmp_path / "c", 3) == 1.0
    manager.save(6, state_of(2.0))
    manager.wait_for_saves()
    assert [s.step for s in results] == [3, 6]


@pytest.mark.parametrize("point", ["during_write", "after_write", "before_commit_marker", "after_commit_marker"])
def test_replacement_writer_continues_from_any_point(manager: CheckpointManager, tmp_path: Path, point: str) -> None:
    manager._pending.worker.close()
    os.environ[settings.FAULT_AT] = f"{point}:0:1:KILL"
    try:
        manager._pending.worker = WriterClient("raw")
        manager.start()
        writer_of(manager)  # it has inherited the environment
    finally:
        del os.environ[settings.FAULT_AT]
    manager.save(3, state_of(1.0))
    manager.wait_for_saves()
    assert saved_value(tmp_path / "c", 3) == 1.0
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000003"]


def test_full_disk_is_reported_at_next_save(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.save(3, state_of(1.0), wait=True)
    manager._pending.worker.close()
    monkeypatch.setenv(settings.FAULT_AT, "during_write:0:1:ENOSPC")
    manager._pending.worker = WriterClient("raw")
    manager.save(6, state_of(2.0))
    assert clock.wait_until(manager.poll, 60.0)
    with pytest.raises(StorageError, match=r"step 6 was not saved: rank 0: .*No space left") as e:
        manager.save(9, state_of(3.0))
    assert e.value.full
    assert not manager.poll()
    manager.save(9, state_of(3.0), wait=True)
    assert [r["step"] for r in inspect.list_checkpoints(tmp_path / "c", verify=True) if r["verified"]] == [3, 9]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-00000003", "step-00000009"]


def test_writer_ignores_job_signals(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.save(3, state_of(1.0), wait=True)
    writer = writer_of(manager)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        writer.send_signal(number)
    manager.save(6, state_of(2.0), wait=True)
    assert writer_of(manager).pid == writer.pid


def test_writer_finishes_its_work_after_close(manager: CheckpointManager, tmp_path: Path) -> None:
    writer = writer_of(manager)
    writer.suspend()
    manager.save(3, state_of(1.0))
    manager.close()
    writer.resume()
    writer.wait(60.0)
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_close_waits_for_pending_saves(manager: CheckpointManager, results: list[SaveResult], tmp_path: Path) -> None:
    manager.save(3, state_of(1.0))
    manager.close(60.0)
    assert [s.step for s in results] == [3]


def test_staging_uses_unnamed_file_if_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "available_memory", lambda: 1000)
    (tmp_path / "c").mkdir()
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}))
    manager.save(3, state_of(1.0), wait=True)
    assert not manager._staging_buffers[0].in_memory
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000003"]
    manager.close()
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_save_uses_reserved_memory(manager: CheckpointManager, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    state = state_of(1.0)
    manager.reserve(state)
    reserved = manager._staging_buffers[0].fd
    assert reserved is not None
    manager.save(3, state, wait=True)
    assert manager._staging_buffers[0].fd == reserved
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_staging_memory_grows_with_state(tmp_path: Path) -> None:
    buffer = StagingBuffer(tmp_path, CPU)
    buffer.stage([to_local_shard("a", "other", torch.zeros(10))])
    size_before, fd = buffer.size, buffer.fd
    buffer.stage([to_local_shard("a", "other", torch.zeros(10))])
    assert (buffer.size, buffer.fd) == (size_before, fd)
    buffer.stage([to_local_shard("a", "other", torch.zeros(10)), to_local_shard("b", "other", torch.ones(2_000_000))])
    assert buffer.size >= 8_000_000 > size_before
    buffer.close()


def test_cgroup_limit_bounds_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 400000\n")
    monkeypatch.setattr(staging, "_list_own_cgroups", lambda: [tmp_path])
    assert available_memory() == 700_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 700_000


def test_save_larger_than_staging_memory_is_complete(manager: CheckpointManager, tmp_path: Path) -> None:
    """The new memory may get the old one's file descriptor number; the writer must not continue with the old memory."""
    for step, size in ((3, 1_000), (6, 1_000_000), (9, 3_000_000)):
        manager.save(step, {"x": torch.full((size,), float(step))}, wait=True)
        state = {"x": torch.zeros(size)}
        restored = CheckpointManager(
            tmp_path / "c", Ranks(), CheckpointConfig(attempt="9", layout={}, async_save=False)
        ).restore(state)
        assert restored is not None and restored.step == step
        assert bool((state["x"] == step).all())


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_in_large_shard_is_reported_with_offset(tmp_path: Path, alone: bool, damage: str) -> None:
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    saved = manager.save(1, {"x": torch.arange(5_000_000, dtype=torch.int32)})
    assert saved is not None
    shard = index.read_manifest(saved.path).tensors[0].shards[0]
    path = saved.path / shard.file
    at = shard.offset + 2 * BLOCK_BYTES + 5
    if damage == "flipped":
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        reason = f"checksum of bytes {at - 5} to {at - 5 + BLOCK_BYTES} differs"
    elif damage == "truncated":
        os.truncate(path, at)
        reason = f"ends at byte {at}"
    else:
        path.unlink()
        reason = "No such file"
    with pytest.raises(DamagedCheckpoint, match=reason):
        read_into(memoryview(bytearray(shard.nbytes)), saved.path, shard, 0, alone=alone)


def test_short_read_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system in user space may return fewer bytes than requested, even in the middle of a file."""
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    whole = torch.arange(5_000_000, dtype=torch.int32)
    saved = manager.save(1, {"x": whole})
    assert saved is not None
    shard = index.read_manifest(saved.path).tensors[0].shards[0]
    original, offsets = os.preadv, []

    def preadv(fd: int, into: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return original(fd, [into[0][:-512]] if len(into[0]) > 4096 else into, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    data = bytearray(shard.nbytes)
    read_into(memoryview(data), saved.path, shard, 0, alone=True)
    assert data == whole.numpy().tobytes()
    assert len(offsets) > 2


@pytest.mark.parametrize("alone", [False, True])
def test_any_range_of_a_shard_can_be_read(tmp_path: Path, alone: bool) -> None:
    """Ranges that start and end anywhere in blocks, the last of which is short."""
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    whole = torch.arange(5_000_000, dtype=torch.int32)  # 4.8 blocks
    saved = manager.save(1, {"x": whole})
    assert saved is not None
    shard = index.read_manifest(saved.path).tensors[0].shards[0]
    everything = whole.numpy().tobytes()
    edges = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 4 * BLOCK_BYTES - 3, 4 * BLOCK_BYTES, len(everything)]
    edges += [len(everything) - 1, 4 * BLOCK_BYTES + 5]
    for low in edges:
        for high in edges:
            if low < high:
                data = bytearray(high - low)
                read_into(memoryview(data), saved.path, shard, low, alone=alone)
                assert data == everything[low:high], (low, high)

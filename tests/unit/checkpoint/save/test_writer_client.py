"""Saves that go on while the training does: a process that writes, and what becomes of it."""

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
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.failures import DeadlineExceeded
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
def told() -> list[SaveResult]:
    return []


@pytest.fixture
def manager(tmp_path: Path, told: list[SaveResult]) -> Iterator[CheckpointManager]:
    made = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}), on_commit=told.append)
    made.start()
    yield made
    made.close()


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


def test_a_save_is_over_before_it_is_written_and_later_changes_do_not_reach_it(
    manager: CheckpointManager, told: list[SaveResult], tmp_path: Path
) -> None:
    state = state_of(1.0)
    writer = writer_of(manager)
    writer.suspend()
    assert manager.save(3, state) is None
    state["weights"].fill_(2.0)
    assert not manager.poll()
    assert inspect.list_checkpoints(tmp_path / "c") == [] and told == []
    writer.resume()
    assert clock.wait_until(lambda: (manager.poll(), told)[1] != [], 60.0)  # without anybody who waits for it
    assert [s.step for s in told] == [3]
    assert told[0].stall_s < told[0].save_s
    manager.wait_for_saves()
    assert [s.step for s in told] == [3]  # told once
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_the_next_save_waits_for_the_memory_of_the_last(manager: CheckpointManager, tmp_path: Path) -> None:
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
def limited(tmp_path: Path, told: list[SaveResult]) -> Iterator[tuple[CheckpointManager, list[float]]]:
    """A manager, and the moment at which waiting ends, once there is one."""
    until: list[float] = []
    made = CheckpointManager(
        tmp_path / "c",
        Ranks(),
        CheckpointConfig(attempt="1", layout={}),
        get_deadline=lambda: until[0] if until else None,
        on_commit=told.append,
    )
    made.start()
    yield made, until
    made.close()


def test_a_save_is_given_up_at_the_deadline(
    limited: tuple[CheckpointManager, list[float]], told: list[SaveResult], tmp_path: Path
) -> None:
    manager, until = limited
    manager.save(3, state_of(1.0), wait=True)
    writer = writer_of(manager)
    writer.suspend()
    until.append(clock.monotonic() + 0.2)
    with pytest.raises(DeadlineExceeded, match=r"step 6 was not saved: rank 0: .*before this process must end"):
        manager.save(6, state_of(2.0), wait=True)
    assert [s.step for s in told] == [3]
    assert saved_value(tmp_path / "c", 3) == 1.0  # which also clears away what the other one has left
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000003"]
    writer.resume()


@pytest.mark.long
@pytest.mark.parametrize("point", ["before_commit_marker", "during_publish", "during_prune"])
def test_the_deadline_may_fall_into_the_commit(
    limited: tuple[CheckpointManager, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    manager, until = limited
    manager.save(3, state_of(1.0), wait=True)
    manager._pending.worker.close()
    monkeypatch.setenv(settings.FAULT_AT, f"{point}:0:1:STOP")  # of the next process
    until.append(clock.monotonic() + 0.5)
    with pytest.raises(DeadlineExceeded, match="step 6 was not saved"):
        manager.save(6, state_of(2.0), wait=True)
    hung = writer_of(manager)
    assert clock.wait_until(lambda: hung.status() == psutil.STATUS_STOPPED, 10.0)
    manager.close(20.0)  # not waited for again
    step, value = (6, 2.0) if point == "during_prune" else (3, 1.0)
    assert saved_value(tmp_path / "c", step) == value
    hung.kill()


def test_what_a_late_writer_makes_again_is_no_hindrance(manager: CheckpointManager, tmp_path: Path) -> None:
    """Of a save that was cleared away before: engines on top of libraries make its folder anew."""
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


def test_a_writer_that_is_killed_is_replaced_and_nothing_is_lost(
    manager: CheckpointManager, told: list[SaveResult], tmp_path: Path
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
    assert [s.step for s in told] == [3, 6]


@pytest.mark.parametrize("point", ["during_write", "after_write", "before_commit_marker", "after_commit_marker"])
def test_another_writer_goes_on_from_any_point(manager: CheckpointManager, tmp_path: Path, point: str) -> None:
    manager._pending.worker.close()
    os.environ[settings.FAULT_AT] = f"{point}:0:1:KILL"
    try:
        manager._pending.worker = WriterClient("raw")
        manager.start()
        writer_of(manager)  # it has its environment
    finally:
        del os.environ[settings.FAULT_AT]
    manager.save(3, state_of(1.0))
    manager.wait_for_saves()
    assert saved_value(tmp_path / "c", 3) == 1.0
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000003"]


def test_a_full_disk_is_told_when_somebody_looks_and_costs_nothing_older(
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


def test_what_ends_a_job_does_not_end_the_writer(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.save(3, state_of(1.0), wait=True)
    writer = writer_of(manager)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        writer.send_signal(number)
    manager.save(6, state_of(2.0), wait=True)
    assert writer_of(manager).pid == writer.pid


def test_the_writer_ends_with_its_rank_when_its_work_is_done(manager: CheckpointManager, tmp_path: Path) -> None:
    writer = writer_of(manager)
    writer.suspend()
    manager.save(3, state_of(1.0))
    manager.close()
    writer.resume()
    writer.wait(60.0)
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_closing_waits_for_what_is_under_way(
    manager: CheckpointManager, told: list[SaveResult], tmp_path: Path
) -> None:
    manager.save(3, state_of(1.0))
    manager.close(60.0)
    assert [s.step for s in told] == [3]


def test_without_enough_memory_the_copy_is_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "available_memory", lambda: 1000)
    (tmp_path / "c").mkdir()
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}))
    manager.save(3, state_of(1.0), wait=True)
    assert not manager._staging_buffers[0].in_memory
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000003"]
    manager.close()
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_room_that_was_reserved_is_what_the_save_takes(manager: CheckpointManager, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    state = state_of(1.0)
    manager.reserve(state)
    reserved = manager._staging_buffers[0].fd
    assert reserved is not None
    manager.save(3, state, wait=True)
    assert manager._staging_buffers[0].fd == reserved
    assert saved_value(tmp_path / "c", 3) == 1.0


def test_memory_grows_with_the_state(tmp_path: Path) -> None:
    made = StagingBuffer(tmp_path, CPU)
    made.stage([to_local_shard("a", "other", torch.zeros(10))])
    small, fd = made.size, made.fd
    made.stage([to_local_shard("a", "other", torch.zeros(10))])
    assert (made.size, made.fd) == (small, fd)
    made.stage([to_local_shard("a", "other", torch.zeros(10)), to_local_shard("b", "other", torch.ones(2_000_000))])
    assert made.size >= 8_000_000 > small
    made.close()


def test_the_limit_of_the_jobs_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 400000\n")
    monkeypatch.setattr(staging, "_list_own_cgroups", lambda: [tmp_path])
    assert available_memory() == 700_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 700_000


def test_a_save_that_outgrows_its_memory_is_whole(manager: CheckpointManager, tmp_path: Path) -> None:
    """The new memory may get the number of the old one's file descriptor; the writer must not go on with the old."""
    for step, size in ((3, 1_000), (6, 1_000_000), (9, 3_000_000)):
        manager.save(step, {"x": torch.full((size,), float(step))}, wait=True)
        state = {"x": torch.zeros(size)}
        restored = CheckpointManager(
            tmp_path / "c", Ranks(), CheckpointConfig(attempt="9", layout={}, async_save=False)
        ).restore(state)
        assert restored is not None and restored.step == step
        assert bool((state["x"] == step).all())


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("what", ["flipped", "truncated", "missing"])
def test_damage_in_a_large_shard_is_told_with_its_place(tmp_path: Path, alone: bool, what: str) -> None:
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    saved = manager.save(1, {"x": torch.arange(5_000_000, dtype=torch.int32)})
    assert saved is not None
    shard = index.read_manifest(saved.path).tensors[0].shards[0]
    path = saved.path / shard.file
    at = shard.offset + 2 * BLOCK_BYTES + 5
    if what == "flipped":
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        said = f"checksum of bytes {at - 5} to {at - 5 + BLOCK_BYTES} differs"
    elif what == "truncated":
        os.truncate(path, at)
        said = f"ends at byte {at}"
    else:
        path.unlink()
        said = "No such file"
    with pytest.raises(DamagedCheckpoint, match=said):
        read_into(memoryview(bytearray(shard.nbytes)), saved.path, shard, 0, alone=alone)


def test_a_read_that_is_cut_short_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system in user space may answer with less than was asked for, in the middle of a file."""
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    whole = torch.arange(5_000_000, dtype=torch.int32)
    saved = manager.save(1, {"x": whole})
    assert saved is not None
    shard = index.read_manifest(saved.path).tensors[0].shards[0]
    original, asked = os.preadv, []

    def preadv(fd: int, into: list[memoryview], offset: int) -> int:
        asked.append(offset)
        return original(fd, [into[0][:-512]] if len(into[0]) > 4096 else into, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    data = bytearray(shard.nbytes)
    read_into(memoryview(data), saved.path, shard, 0, alone=True)
    assert data == whole.numpy().tobytes()
    assert len(asked) > 2


@pytest.mark.parametrize("alone", [False, True])
def test_any_part_of_a_shard_reads_right(tmp_path: Path, alone: bool) -> None:
    """Parts that begin and end anywhere in blocks, the last of which is short."""
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

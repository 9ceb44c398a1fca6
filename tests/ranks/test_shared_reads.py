"""Ranks of a node read shared data once, for any sizes and layouts, and damage is reported to all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.rank_team import Team, run_team
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load import shared_read as shared
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import CheckpointError

pytestmark = pytest.mark.ranks

# Rows aligned with blocks of checksums and rows that are not, very long rows, one dimension, three; more than a
# step can hold; dtypes of other sizes between them; too small to share.
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((4096, 1024), torch.float32),
    "odd": ((3001, 1237), torch.float32),
    "long": ((3, 6_000_000), torch.float32),
    "flat": ((5_000_011,), torch.bfloat16),
    "bytes": ((1111, 3333), torch.uint8),
    "deep": ((96, 70, 513), torch.float64),
    "small": ((16, 16), torch.float32),
}


def full_tensor(name: str) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    made = torch.Generator().manual_seed(len(name) * 7 + shape[0])
    return torch.randint(0, 250, shape, generator=made).to(dtype)


def state_of(how: str, filled: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    tensors: dict[str, Any] = {}
    for name, (shape, _) in SHAPES.items():
        tensor = full_tensor(name) if filled else torch.zeros_like(full_tensor(name))
        at = Shard(0) if how == "columns" and len(shape) == 1 else placed.get(how)
        tensors[name] = tensor if at is None else distribute_tensor(tensor, mesh, [at])
    return tensors


def manager_of(team: Team, folder: Path) -> CheckpointManager:
    return CheckpointManager(
        folder, Ranks(team.new_group()), CheckpointConfig(attempt="1", layout={}, async_save=False)
    )


def save(team: Team, folder: Path, how: str) -> None:
    manager_of(team, folder).save(1, state_of(how, True))


def restore(team: Team, folder: Path, how: str, setup: Callable[[], None] | None = None) -> list[str]:
    """Job of a team: return the errors of all ranks, from rank 0."""
    if setup is not None:
        setup()
    state = state_of(how, False)
    restored = manager_of(team, folder).restore(state)
    wrong = []
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(full, full_tensor(name)):
            wrong.append(name)
    if restored is None or restored.step != 1:
        wrong.append("nothing restored")
    return [w for each in _gathered(wrong) for w in each]


def _gathered(value: Any) -> list[Any]:
    tensors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tensors, value)
    return tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint saved by four ranks, sharded by rows."""
    folder = tmp_path_factory.mktemp("saved")
    run_team(4, 1, save, folder, "rows")
    return folder


@pytest.mark.parametrize("how", ["rows", "columns", "copies", "plain"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_layout_is_restored(saved: Path, how: str, ranks: int) -> None:
    assert run_team(ranks, 1, restore, saved, how) == []


@pytest.mark.parametrize("setup", ["not_allowed", "another_process", "no_memory", "other_nodes"])
def test_ranks_without_shared_memory_read_separately(saved: Path, setup: str) -> None:
    assert run_team(3, 1, restore, saved, "columns", SETUPS[setup]) == []


class PatchedOs:
    """The module ``os`` with some functions replaced."""

    def __init__(self, **other: Any) -> None:
        self.__dict__.update(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def not_allowed() -> None:
    """Setup: rank 1 has no permission to read the memory of the others."""

    def open_(path: Any, *args: Any) -> int:
        if str(path).startswith("/proc/") and dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied")
        return os.open(path, *args)

    shared.os = PatchedOs(open=open_)  # type: ignore[assignment]


def another_process() -> None:
    """Setup: rank 1 finds its own memory under another process id, as on two machines that are copies."""

    def open_(path: Any, *args: Any) -> int:
        own = f"/proc/{os.getpid()}/fd/{path.rpartition('/')[2]}"
        return os.open(own if dist.get_rank() == 1 else path, *args)

    shared.os = PatchedOs(open=open_)  # type: ignore[assignment]


def no_memory() -> None:
    """Setup: rank 1 cannot allocate memory; the other two continue together."""

    def memfd_create(name: str) -> int:
        if dist.get_rank() == 1:
            raise OSError(12, "Cannot allocate memory")
        return os.memfd_create(name)

    shared.os = PatchedOs(memfd_create=memfd_create)  # type: ignore[assignment]


def other_nodes() -> None:
    """Setup: rank 2 is on another machine than the other two."""
    original = shared._node_id
    shared._node_id = lambda: bytes(16) if dist.get_rank() == 2 else original()


SETUPS: dict[str, Callable[[], None]] = {f.__name__: f for f in (not_allowed, another_process, no_memory, other_nodes)}


def test_different_checkpoints_of_one_step_are_reported(saved: Path, tmp_path: Path) -> None:
    """The checkpoints have the same step, as on a file system with stale caches."""
    both = [tmp_path / "0", tmp_path / "1"]
    for folder in both:
        run_team(2, 1, save, folder, "rows")
    message = run_team(2, 1, message_with_other_folders, both)
    assert message == ["the ranks see different checkpoints of the same step"] * 2


def message_with_other_folders(team: Team, folders: list[Path]) -> list[str]:
    """Job of a team: return each rank's message if every rank reads a different folder."""
    try:
        manager_of(team, folders[team.rank]).restore(state_of("columns", False))
        message = "restored"
    except StorageError as e:
        tensors = re.search("the ranks see [a-z ]*", e.message)
        message = tensors[0] if tensors else e.message
    return _gathered(message)


def test_tensor_of_another_shape_is_refused(saved: Path) -> None:
    message = run_team(2, 1, message_for_other_shape, saved)
    assert all("small has shape (16, 16), but (1, 16) in this run" in s for s in message)


def message_for_other_shape(team: Team, folder: Path) -> list[str]:
    """Job of a team: return each rank's message."""
    try:
        manager_of(team, folder).restore({**state_of("plain", False), "small": torch.zeros(1, 16)})
        message = "restored"
    except CheckpointError as e:
        message = e.message
    return _gathered(message)


def test_node_reads_each_byte_once(saved: Path) -> None:
    read, existing = run_team(3, 1, bytes_read, saved, "copies")
    assert existing <= read <= 1.3 * existing  # some blocks lie across an edge


def bytes_read(team: Team, folder: Path, how: str) -> tuple[int, int]:
    """Job of a team: return how many bytes of large tensors all ranks have read, and how many exist."""
    from clustertrain.checkpoint.format import shard_io

    original, count = shard_io.find_bad_block, [0]

    def counted(data: memoryview, *args: Any) -> Any:
        count[0] += len(data)
        return original(data, *args)

    shard_io.find_bad_block = counted
    state = state_of(how, False)
    del state["long"]  # its rows are larger than one read
    manager_of(team, folder).restore(state)
    manifest = index.read_manifest(inspect.find_checkpoint(folder))
    existing = sum(s.nbytes for t in manifest.tensors for s in t.shards if t.name in state)
    return sum(_gathered(count[0])), existing


def test_damage_is_reported_to_all_ranks(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_team(4, 1, save, folder, "rows")
    manifest = index.read_manifest(inspect.find_checkpoint(folder))
    shard = next(t for t in manifest.tensors if t.name == "even").shards[1]
    with (inspect.find_checkpoint(folder) / shard.file).open("r+b") as file:  # type: ignore[union-attr]
        file.seek(shard.offset + 12345)
        file.write(b"\x99")
    assert run_team(2, 1, message_for_damage, folder, "columns") == ["no checkpoint is valid", "no checkpoint is valid"]


def message_for_damage(team: Team, folder: Path, how: str) -> list[str]:
    """Job of a team: return each rank's message."""
    try:
        manager_of(team, folder).restore(state_of(how, False))
        message = "restored"
    except Exception as e:
        message = "no checkpoint is valid" if "no checkpoint is valid" in str(e) and "checksum" in str(e) else str(e)
    return _gathered(message)

"""Ranks of a node read shared data once, with any sizes and layouts, and damage is reported to all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.rank_team import Team, run_team
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load import shared_read as shared
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import CheckpointError
from tests.ranks.rank_pool import DEVICE

pytestmark = pytest.mark.ranks

# Rows that are aligned with checksum blocks, unaligned and very long; one and three dimensions; more data than one step
# can hold; dtypes of several sizes; a tensor that is too small to share.
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
    rng = torch.Generator().manual_seed(len(name) * 7 + shape[0])
    return torch.randint(0, 250, shape, generator=rng).to(dtype)


def open_mesh() -> DeviceMesh:
    if DEVICE == "cpu":
        return init_device_mesh("cpu", (dist.get_world_size(),))
    torch.cuda.set_device(dist.get_rank())
    return DeviceMesh.from_group(dist.new_group(backend="nccl"), DEVICE)


def build_state(placement: str, filled: bool) -> dict[str, Any]:
    mesh = open_mesh()
    placements = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    tensors: dict[str, Any] = {}
    for name, (shape, _) in SHAPES.items():
        tensor = (full_tensor(name) if filled else torch.zeros_like(full_tensor(name))).to(DEVICE)
        tensor_placement = Shard(0) if placement == "columns" and len(shape) == 1 else placements.get(placement)
        tensors[name] = tensor if tensor_placement is None else distribute_tensor(tensor, mesh, [tensor_placement])
    return tensors


def open_manager(team: Team, folder: Path) -> CheckpointManager:
    config = CheckpointConfig(attempt="1", layout={}, async_save=False, device=torch.device(DEVICE))
    return CheckpointManager(folder, Ranks(team.new_control_group()), config)


def save(team: Team, folder: Path, placement: str) -> None:
    open_manager(team, folder).save(1, build_state(placement, True))


def restore(team: Team, folder: Path, placement: str, setup: Callable[[], None] | None = None) -> list[str]:
    """Job of a team: restore the checkpoint and return the names of wrong tensors on any rank."""
    if setup is not None:
        setup()
    state = build_state(placement, False)
    restored = open_manager(team, folder).restore(state)
    errors = []
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(full.cpu(), full_tensor(name)):
            errors.append(name)
    if restored is None or restored.step != 1:
        errors.append("nothing restored")
    return [error for rank_errors in _gather(errors) for error in rank_errors]


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint that four ranks have saved, sharded by rows."""
    folder = tmp_path_factory.mktemp("saved")
    run_team(4, 1, save, folder, "rows")
    return folder


@pytest.mark.parametrize("placement", ["rows", "columns", "copies", "plain"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_layout_is_restored(saved: Path, placement: str, ranks: int) -> None:
    assert run_team(ranks, 1, restore, saved, placement) == []


@pytest.mark.parametrize("setup", ["not_allowed", "another_process", "no_memory", "other_nodes"])
def test_ranks_without_shared_memory_read_separately(saved: Path, setup: str) -> None:
    assert run_team(3, 1, restore, saved, "columns", SETUPS[setup]) == []


class PatchedOs:
    """Stand-in for the module ``os`` with some functions replaced."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def not_allowed() -> None:
    """Setup: deny rank 1 the permission to read the memory of the others."""

    def open_(path: Any, *args: Any) -> int:
        if str(path).startswith("/proc/") and dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied")
        return os.open(path, *args)

    shared.os = PatchedOs(open=open_)  # type: ignore[assignment]


def another_process() -> None:
    """Setup: let rank 1 find its own memory under the process ids of others, as on cloned machines."""

    def open_(path: Any, *args: Any) -> int:
        own_path = f"/proc/{os.getpid()}/fd/{path.rpartition('/')[2]}"
        return os.open(own_path if dist.get_rank() == 1 else path, *args)

    shared.os = PatchedOs(open=open_)  # type: ignore[assignment]


def no_memory() -> None:
    """Setup: let the allocation of memory fail on rank 1; the other two ranks still share."""

    def memfd_create(name: str) -> int:
        if dist.get_rank() == 1:
            raise OSError(12, "Cannot allocate memory")
        return os.memfd_create(name)

    shared.os = PatchedOs(memfd_create=memfd_create)  # type: ignore[assignment]


def other_nodes() -> None:
    """Setup: put rank 2 on another machine than the other two."""
    original = shared._node_id
    shared._node_id = lambda: bytes(16) if dist.get_rank() == 2 else original()


SETUPS: dict[str, Callable[[], None]] = {f.__name__: f for f in (not_allowed, another_process, no_memory, other_nodes)}


def test_different_checkpoints_of_one_step_are_reported(saved: Path, tmp_path: Path) -> None:
    """Each rank reads another folder with the same step, as on a file system with stale caches."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        run_team(2, 1, save, folder, "rows")
    message = run_team(2, 1, message_with_other_folders, folders)
    assert message == ["the ranks see different checkpoints of the same step"] * 2


def message_with_other_folders(team: Team, folders: list[Path]) -> list[str]:
    """Job of a team: return each rank's message if every rank reads a different folder."""
    try:
        open_manager(team, folders[team.rank]).restore(build_state("columns", False))
        message = "restored"
    except StorageError as e:
        match = re.search("the ranks see [a-z ]*", e.message)
        message = match[0] if match else e.message
    return _gather(message)


def test_tensor_of_another_shape_is_refused(saved: Path) -> None:
    message = run_team(2, 1, message_for_other_shape, saved)
    assert all("small has shape (16, 16), but (1, 16) in this run" in s for s in message)


def message_for_other_shape(team: Team, folder: Path) -> list[str]:
    """Job of a team: return each rank's message."""
    try:
        open_manager(team, folder).restore({**build_state("plain", False), "small": torch.zeros(1, 16, device=DEVICE)})
        message = "restored"
    except CheckpointError as e:
        message = e.message
    return _gather(message)


def test_node_reads_each_byte_once(saved: Path) -> None:
    read, existing = run_team(3, 1, bytes_read, saved, "copies")
    assert existing <= read <= 1.3 * existing  # some blocks overlap two reads


def bytes_read(team: Team, folder: Path, placement: str) -> tuple[int, int]:
    """Job of a team: return how many bytes of large tensors all ranks have read, and how many the tensors have."""
    from clustertrain.checkpoint.format import shard_io

    original, count = shard_io.find_bad_block, [0]

    def count_bytes(data: memoryview, *args: Any) -> Any:
        count[0] += len(data)
        return original(data, *args)

    shard_io.find_bad_block = count_bytes
    state = build_state(placement, False)
    del state["long"]  # its rows are larger than one read
    open_manager(team, folder).restore(state)
    manifest = index.read_manifest(inspect.find_checkpoint(folder))
    existing = sum(s.nbytes for t in manifest.tensors for s in t.shards if t.name in state)
    return sum(_gather(count[0])), existing


def test_damage_is_reported_to_all_ranks(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run_team(4, 1, save, folder, "rows")
    manifest = index.read_manifest(inspect.find_checkpoint(folder))
    shard = next(t for t in manifest.tensors if t.name == "even").shards[1]
    with (inspect.find_checkpoint(folder) / shard.file).open("r+b") as file:  # type: ignore[union-attr]
        file.seek(shard.offset + 12345)
        file.write(b"\x99")
    assert run_team(2, 1, message_for_damage, folder, "columns") == ["no checkpoint is valid", "no checkpoint is valid"]


def message_for_damage(team: Team, folder: Path, placement: str) -> list[str]:
    """Job of a team: return each rank's message."""
    try:
        open_manager(team, folder).restore(build_state(placement, False))
        message = "restored"
    except Exception as e:
        message = "no checkpoint is valid" if "no checkpoint is valid" in str(e) and "checksum" in str(e) else str(e)
    return _gather(message)

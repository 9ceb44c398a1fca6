"""Frozen files of the last committed checkpoint are linked: what a save then writes, and that no checkpoint depends on
another one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain import settings
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES
from clustertrain.checkpoint.format.staged_segments import Segment
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager, SaveResult
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save import commit, links
from clustertrain.checkpoint.save.writer_jobs import CommitJob, WriteJob

FROZEN = "rank-0.frozen-0.bin"
WIDTH = 1536  # a frozen layer of 9 MiB, three blocks


class Adapted(nn.Module):
    """A frozen layer with a buffer, and a small trained adapter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.other = nn.Linear(width, width // 4, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(width, 2)
        self.register_buffer("count", torch.zeros(100))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for p in self.adapter.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()


def state_of(seed: int = 0, width: int = WIDTH) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Adapted(width)
    return {"model": model, "optimizer": torch.optim.AdamW(model.adapter.parameters())}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def state() -> dict[str, Any]:
    return state_of()


def manager_of(root: Path, **options: Any) -> CheckpointManager:
    config = {"attempt": "1", "layout": {}, "policy": RetentionPolicy(keep=9), "async_save": False, **options}
    return CheckpointManager(root, Ranks(), CheckpointConfig(**config))


def save(root: Path, state: dict[str, Any], step: int, **options: Any) -> SaveResult:
    state["model"].step(state["optimizer"])
    saved = manager_of(root, **options).save(step, state, {"random": torch.get_rng_state()})
    assert saved is not None
    return saved


def inode(root: Path, step: int, name: str = FROZEN) -> int:
    return (index.step_folder(root, step) / name).stat().st_ino


def restored_step(root: Path, like: dict[str, Any]) -> int:
    """Restore in another attempt, compare the model with ``like``, and return the step."""
    state = state_of(9)
    result = manager_of(root, attempt="9").restore(state)
    assert result is not None
    saved, loaded = like["model"].state_dict(), state["model"].state_dict()
    for name in ("base.weight", "other.weight"):
        assert torch.equal(saved[name], loaded[name])
    return result.step


def flip(path: Path, at: int) -> None:
    """Change a byte in place: the damage is in all links."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def files_of(root: Path, step: int) -> list[str]:
    return sorted(index.read_manifest(index.step_folder(root, step)).files)


# -- what is written


def test_a_later_save_writes_at_most_one_percent(root: Path, state: dict[str, Any]) -> None:
    first, second = save(root, state, 3), save(root, state, 6)
    assert first.written == first.bytes == second.bytes > 11 << 20
    assert second.written <= first.bytes / 100
    folder = index.step_folder(root, 6)
    new_files = [p for p in folder.iterdir() if p.stat().st_nlink == 1]
    assert sorted(p.name for p in new_files) == ["COMMITTED", "manifest.json", "rank-0.bin"]
    assert sum(p.stat().st_size for p in new_files) <= first.bytes / 100 + (folder / "manifest.json").stat().st_size
    assert index.read_manifest(folder).linked == (FROZEN,)
    assert restored_step(root, state) == 6


def test_the_bytes_do_not_depend_on_links(root: Path, state: dict[str, Any], tmp_path: Path) -> None:
    save(root, state, 3)
    save(root, state, 6)
    manager_of(tmp_path / "alone").save(6, state)
    kinds = ("model", "optimizer")
    digests = [inspect.digest(index.step_folder(r, 6), kinds) for r in (root, tmp_path / "alone")]
    assert digests[0] == digests[1]
    copied = shutil.copytree(index.step_folder(root, 6), tmp_path / "copied" / "step-00000006")
    assert inspect.find_damage(copied) == []


def test_full_training_has_one_file_and_reads_no_manifest(
    root: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state["model"].requires_grad_(True)  # the buffer is too small to matter

    def unexpected(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(links, "read_manifest", unexpected)
    monkeypatch.setattr(links, "compare_blocks", unexpected)
    for step in (3, 6):
        saved = save(root, state, step)
        assert saved.written == saved.bytes
        assert files_of(root, step) == ["rank-0.bin"]
    assert index.read_manifest(index.step_folder(root, 6)).linked == ()


def test_a_small_change_leaves_the_rest_linked(root: Path, state: dict[str, Any]) -> None:
    first = save(root, state, 3)
    state["model"].count += 1
    second = save(root, state, 6)
    assert (inode(root, 6), files_of(root, 6)) == (inode(root, 3), ["rank-0.bin", FROZEN])
    assert second.written <= first.bytes / 100
    assert inspect.find_damage(index.step_folder(root, 6)) == []
    restored = state_of(9)
    manager_of(root).restore(restored)
    assert torch.equal(restored["model"].count, state["model"].count)


def test_a_large_change_gets_a_file_that_is_linked_from_then_on(root: Path, state: dict[str, Any]) -> None:
    save(root, state, 3)
    state["model"].other.weight.mul_(2)
    changed, later = save(root, state, 6), save(root, state, 9)
    assert files_of(root, 9) == ["rank-0.bin", FROZEN, "rank-0.frozen-1.bin"]
    assert inode(root, 9) == inode(root, 3) and inode(root, 9, "rank-0.frozen-1.bin") == inode(
        root, 6, "rank-0.frozen-1.bin"
    )
    assert 2 << 20 < changed.written < 3 << 20 and later.written < 1 << 20
    assert restored_step(root, state) == 9


def test_a_file_of_which_less_than_half_is_needed_is_not_linked(root: Path, state: dict[str, Any]) -> None:
    save(root, state, 3)
    state["model"].base.weight.mul_(2)
    saved = save(root, state, 6)
    assert saved.written == saved.bytes
    assert files_of(root, 6) == ["rank-0.bin", FROZEN] and inode(root, 6) != inode(root, 3)
    assert restored_step(root, state) == 6


def test_unfrozen_parameters_are_written_with_what_is_trained(root: Path, state: dict[str, Any]) -> None:
    save(root, state, 3)
    state["model"].other.requires_grad_(True)
    saved = save(root, state, 6)
    assert inode(root, 6) == inode(root, 3)
    assert 2 << 20 < saved.written < 3 << 20
    assert restored_step(root, state) == 6


def test_a_new_attempt_links_too(root: Path, state: dict[str, Any]) -> None:
    save(root, state, 3)
    resumed = state_of(9)
    manager = manager_of(root, attempt="2")
    manager.restore(resumed)
    saved = save(root, resumed, 6, attempt="2")
    assert saved.written <= saved.bytes / 100


def test_engines_of_libraries_write_everything(root: Path, state: dict[str, Any]) -> None:
    for step in (3, 6):
        saved = save(root, state, step, engine="dcp")
        assert saved.written == saved.bytes
    assert inspect.find_damage(index.step_folder(root, 6)) == []


# -- independence


def test_pruning_the_first_leaves_the_second_whole(root: Path, state: dict[str, Any]) -> None:
    for step in (3, 6, 9):
        save(root, state, step, policy=RetentionPolicy(keep=1))
        assert [index.parse_step(p) for p in index.list_checkpoint_folders(root)] == [step]
    assert (index.step_folder(root, 9) / FROZEN).stat().st_nlink == 1
    assert inspect.find_damage(index.step_folder(root, 9)) == []
    assert restored_step(root, state) == 9


def test_damage_is_reported_for_all_that_share_it(root: Path, state: dict[str, Any]) -> None:
    for step in (3, 6):
        save(root, state, step)
    flip(index.step_folder(root, 3) / FROZEN, 5 << 20)
    for step in (3, 6):
        (message,) = inspect.find_damage(index.step_folder(root, step))
        assert message.startswith(f"{index.step_folder(root, step) / FROZEN}: checksum of bytes")
    assert [r["verified"] for r in inspect.list_checkpoints(root, verify=True)] == [False, False]


@pytest.mark.long
def test_restore_falls_back_to_a_checkpoint_with_a_file_of_its_own(
    root: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, state, 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse(errno.EMLINK))
        save(root, state, 6)
    save(root, state, 9)
    flip(index.step_folder(root, 9) / FROZEN, 5 << 20)
    assert restored_step(root, state) == 3
    assert [p.name for p in index.list_damaged_folders(root)] == ["damaged-step-00000006", "damaged-step-00000009"]
    save(root, state, 12)
    assert inode(root, 12) == inode(root, 3)
    assert inspect.find_damage(index.step_folder(root, 12)) == []


@pytest.mark.long
def test_damage_is_found_within_a_few_saves_and_written_again(
    root: Path, state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    save(root, state, 1)
    flip(index.step_folder(root, 1) / FROZEN, BLOCK_BYTES + 7)
    written = []
    for step in range(2, 2 + links.VERIFIED_FRACTION):
        saved = save(root, state, step)
        written.append(saved.written == saved.bytes)
    assert written.count(True) == 1
    assert "checksum of bytes" in caplog.text and "the new checkpoint has its own copy" in caplog.text
    assert inspect.find_damage(index.step_folder(root, 1 + links.VERIFIED_FRACTION)) == []


def test_a_truncated_file_is_not_linked(root: Path, state: dict[str, Any]) -> None:
    save(root, state, 3)
    os.truncate(index.step_folder(root, 3) / FROZEN, 5 << 20)
    saved = save(root, state, 6)
    assert saved.written == saved.bytes and inspect.find_damage(index.step_folder(root, 6)) == []


def test_a_symbolic_link_is_not_linked(root: Path, state: dict[str, Any], tmp_path: Path) -> None:
    """Somebody has moved the file to another disk."""
    save(root, state, 3)
    path = index.step_folder(root, 3) / FROZEN
    path.rename(tmp_path / "moved.bin")
    path.symlink_to(tmp_path / "moved.bin")
    saved = save(root, state, 6)
    assert saved.written == saved.bytes and not (index.step_folder(root, 6) / FROZEN).is_symlink()


def refuse(code: int) -> Callable[..., None]:
    def link(*args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return link


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.ENOENT, errno.ENOSPC, errno.ENOTSUP])
def test_a_failing_link_writes_the_bytes(
    root: Path, state: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, state, 3)
    monkeypatch.setattr(os, "link", refuse(code))
    for step in (6, 9):
        saved = save(root, state, step)
        assert saved.written == saved.bytes
    reason = f"no files of older checkpoints can be linked: {os.strerror(code)}"
    message = f"{root}: {reason}; the new checkpoint has its own copy"
    assert [r.message for r in caplog.records] == [message]  # not with every save
    for step in (3, 6):
        shutil.rmtree(index.step_folder(root, step))
    assert restored_step(root, state) == 9


def test_a_checkpoint_that_is_deleted_meanwhile(
    root: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, state, 3)
    link = os.link

    def delete_first(source: Path, target: Path) -> None:
        shutil.rmtree(source.parent)
        link(source, target)

    monkeypatch.setattr(os, "link", delete_first)
    saved = save(root, state, 6)
    assert saved.written == saved.bytes and restored_step(root, state) == 6
    assert caplog.records == []


def test_a_checkpoint_that_is_replaced_meanwhile(
    root: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, state, 3)
    link = os.link

    def replace_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        save(root, state_of(1), 3, attempt="2")
        link(source, target)

    monkeypatch.setattr(os, "link", replace_first)
    saved = save(root, state, 6)
    assert saved.written == saved.bytes and restored_step(root, state) == 6


def test_an_unreadable_manifest_writes_everything(
    root: Path, state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    save(root, state, 3)
    (index.step_folder(root, 3) / "manifest.json").write_bytes(b"{}")
    saved = save(root, state, 6)
    assert saved.written == saved.bytes
    assert "the new checkpoint links nothing" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("point", ["before_write", "during_write", "after_write", "before_commit_marker"])
def test_a_killed_writer_links_once_more(
    root: Path, state: dict[str, Any], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, state, 3)
    manager = manager_of(root, attempt="2", async_save=True)
    monkeypatch.setenv(settings.FAULT_AT, f"{point}:0:1:KILL")
    manager.start()
    monkeypatch.delenv(settings.FAULT_AT)
    saved = manager.save(6, state, wait=True)
    manager.close()
    assert saved is not None and saved.written <= saved.bytes / 100
    assert inode(root, 6) == inode(root, 3) and files_of(root, 6) == ["rank-0.bin", FROZEN]
    assert restored_step(root, state) == 6


@pytest.mark.long
def test_a_failed_save_removes_its_links_only(
    root: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, state, 3)
    manager = manager_of(root, attempt="2", async_save=True)
    monkeypatch.setenv(settings.FAULT_AT, "during_write:0:1:ENOSPC")
    manager.start()
    with pytest.raises(StorageError, match="No space left"):
        manager.save(6, state, wait=True)
    manager.close()
    assert [p.name for p in root.iterdir()] == ["step-00000003"]
    assert (index.step_folder(root, 3) / FROZEN).stat().st_nlink == 1
    assert inspect.find_damage(index.step_folder(root, 3)) == []


# -- several ranks, and their offline view


def save_on_ranks(root: Path, step: int, data: bytes, ranks: int, *, adapter: bytes) -> index.Manifest:
    """Save rows of a frozen tensor on each rank, and a trained one on rank 0, as the ranks' writers do."""
    folder = index.staging_folder(root, step, f"1-{step:08x}")
    folder.mkdir(parents=True)
    rows = len(data) // ranks
    for rank in range(ranks):
        memory = data[rank * rows : (rank + 1) * rows] + adapter
        common: dict[str, Any] = {"kind": "model", "dtype": "uint8", "itemsize": 1}
        segments = [
            Segment(
                name="model/base", shape=(len(data),), start=(rank * rows,), chunk_shape=(rows,), buffer_offset=0,
                nbytes=rows, is_frozen=True, **common,
            )
        ]  # fmt: skip
        if rank == 0:
            shape = (len(adapter),)
            segments.append(
                Segment(
                    name="model/adapter", shape=shape, start=(0,), chunk_shape=shape, buffer_offset=rows,
                    nbytes=len(adapter), **common,
                )
            )  # fmt: skip
        job = WriteJob(
            step=step, folder=str(folder), rank=rank, engine="raw", buffer_index=0, segments=segments, rank_values=None
        )
        commit.write_and_mark_done(job, memoryview(memory))
    return commit.commit(
        CommitJob(
            step=step,
            folder=str(folder),
            root=str(root),
            engine="raw",
            world_size=ranks,
            torch="2",
            layout={},
            values={},
            reason="interval",
            metric=None,
            about={},
            policy=RetentionPolicy(keep=9),
            rank_timeout_s=1.0,
        ),
        lambda: True,
        lambda: True,
    )


def test_each_rank_links_its_own_file(root: Path) -> None:
    data = os.urandom(12 << 20)
    first = save_on_ranks(root, 3, data, 2, adapter=b"a" * 1000)
    second = save_on_ranks(root, 6, data, 2, adapter=b"b" * 1000)
    assert second.linked == ("rank-0.frozen-0.bin", "rank-1.frozen-0.bin")
    assert (first.written_bytes, second.written_bytes) == (len(data) + 1000, 1000)


@pytest.mark.long
def test_on_another_number_of_ranks_all_is_written_once(root: Path) -> None:
    data = os.urandom(12 << 20)
    save_on_ranks(root, 3, data, 2, adapter=b"a")
    assert save_on_ranks(root, 6, data, 3, adapter=b"b").linked == ()
    assert len(save_on_ranks(root, 9, data, 3, adapter=b"c").linked) == 3
    assert inspect.digest(index.step_folder(root, 3), ["model"]) != inspect.digest(
        index.step_folder(root, 9), ["model"]
    )
    for step in (3, 6, 9):
        manifest = index.read_manifest(index.step_folder(root, step))
        base = next(t for t in manifest.tensors if t.name == "model/base")
        assert inspect.assemble_tensor(index.step_folder(root, step), base).tobytes() == data


def test_shared_bytes_are_counted_once(root: Path, state: dict[str, Any]) -> None:
    for step in (3, 6, 9):
        save(root, state, step)
    rows = inspect.list_checkpoints(root)
    on_disk = {(s.st_dev, s.st_ino): s.st_size for s in (p.stat() for p in root.rglob("*") if p.is_file())}
    assert sum(r["new_bytes"] for r in rows) == sum(on_disk.values())
    assert rows[0]["new_bytes"] == rows[0]["bytes"] and rows[1]["new_bytes"] < rows[1]["bytes"] / 50
    assert [r["new_bytes"] for r in inspect.list_checkpoints(root, step=6)] == [None]
    assert json.dumps(rows)

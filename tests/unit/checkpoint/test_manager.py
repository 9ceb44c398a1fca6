"""The checkpoint manager in one process: saves round-trip, and damage is never restored."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import direct_io, folders, storage_errors
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import CheckpointError, NotFound


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.samples_seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples_seen += len(x)
        out: torch.Tensor = self.norm(self.a(x))
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"samples_seen": self.samples_seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.samples_seen = state["samples_seen"]


def make_state(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = Net().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler, "note": {"epoch": seed}}


def train(state: dict[str, Any], steps: int = 3) -> None:
    dtype = next(state["model"].parameters()).dtype
    for _ in range(steps):
        state["model"](torch.randn(8, 4, dtype=dtype)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    inner = [v for s in state["optimizer"].state.values() for v in s.values()]
    return [*state["model"].parameters(), *state["model"].buffers(), *inner]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "with space" / "checkpoints"


@pytest.fixture
def manager(root: Path) -> CheckpointManager:
    return CheckpointManager(
        root,
        Ranks(),
        CheckpointConfig(attempt="1", layout={"strategy": "single"}, policy=RetentionPolicy(keep=3), async_save=False),
    )


def flip(path: Path, at: int = 10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_save_and_restore_round_trip(manager: CheckpointManager, dtype: torch.dtype) -> None:
    old = make_state(1, dtype)
    train(old)
    saved = manager.save(3, old, {"random": torch.get_rng_state()})
    new = make_state(2, dtype)
    restored = manager.restore(new)
    assert restored is not None
    assert (restored.step, restored.skipped, saved.bytes > 0) == (3, [], True)
    assert all(torch.equal(a, b) for a, b in zip(tensors(old), tensors(new), strict=True))
    assert new["model"].samples_seen == old["model"].samples_seen == 24
    assert new["note"] == {"epoch": 1}
    assert new["scheduler"].state_dict() == old["scheduler"].state_dict()
    assert torch.equal(restored.rank_state["random"], torch.get_rng_state()) is False
    torch.set_rng_state(restored.rank_state["random"])
    train(new)
    torch.set_rng_state(restored.rank_state["random"])
    train(old)
    assert all(torch.equal(a, b) for a, b in zip(tensors(old), tensors(new), strict=True))


def test_nothing_to_restore(manager: CheckpointManager) -> None:
    assert manager.restore(make_state()) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: flip(f / "rank-0.bin"),
        lambda f: flip(f / "rank-0.bin", -1),
        lambda f: os.truncate(f / "rank-0.bin", 40),
        lambda f: (f / "rank-0.bin").unlink(),
        lambda f: flip(f / "manifest.json", 100),
        lambda f: (f / "manifest.json").unlink(),
        lambda f: (f / "COMMITTED").write_bytes(b""),
    ],
    ids=[
        "flipped byte",
        "flipped last byte",
        "truncated",
        "missing data",
        "flipped manifest",
        "missing manifest",
        "empty marker",
    ],
)
def test_damaged_checkpoint_falls_back_to_previous(manager: CheckpointManager, root: Path, damage: Any) -> None:
    old = make_state(1)
    train(old)
    manager.save(3, old)
    train(old)
    untrained = [t.clone() for t in tensors(make_state(1))]
    manager.save(6, old)
    damage(index.step_folder(root, 6))
    with pytest.raises(DamagedCheckpoint):
        inspect.verify(index.step_folder(root, 6))
    new = make_state(2)
    restored = manager.restore(new)
    assert restored is not None
    assert restored.step == 3
    assert [s["step"] for s in restored.skipped] == [6]
    assert str(index.step_folder(root, 6)) in restored.skipped[0]["reason"]
    assert len(tensors(new)) > len(untrained)
    # Set aside, so that neither a later restart nor retention considers it the newest.
    assert [index.parse_step(p) for p in index.list_checkpoint_folders(root)] == [3]
    again = manager.restore(make_state(2))
    assert again is not None
    assert again.skipped == []
    manager.save(6, new)
    assert index.list_damaged_folders(root) == []
    inspect.verify(index.step_folder(root, 6))


def test_restore_fails_if_no_checkpoint_is_valid(manager: CheckpointManager, root: Path) -> None:
    manager.save(3, make_state())
    flip(index.step_folder(root, 3) / "rank-0.bin")
    with pytest.raises(CheckpointError, match=r"no checkpoint is valid(.|\n)*rank-0\.bin"):
        manager.restore(make_state())
    assert [index.parse_step(p) for p in index.list_checkpoint_folders(root)] == [3]


@pytest.mark.parametrize("content", [b"", b'[{"last_step": 3', b"null", b"[{}]", b"\0" * 64, b"\xff"])
def test_restore_refuses_without_a_readable_record_of_rollbacks(
    manager: CheckpointManager, root: Path, content: bytes
) -> None:
    """Any of the checkpoints may be invalid."""
    manager.save(3, make_state())
    (root / rollback.RECORD_FILE).write_bytes(content)
    restored = make_state(seed=1)
    before = [t.clone() for t in tensors(restored)]
    with pytest.raises(CheckpointError, match=rollback.RECORD_FILE):
        manager.restore(restored)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(restored), strict=True))
    assert index.has_commit_marker(index.step_folder(root, 3))


def test_uncommitted_folder_is_not_restored(manager: CheckpointManager, root: Path) -> None:
    manager.save(3, make_state())
    manager.save(6, make_state())
    (index.step_folder(root, 6) / "COMMITTED").unlink()
    restored = manager.restore(make_state())
    assert restored is not None
    assert restored.step == 3
    manager.save(6, make_state())
    inspect.verify(index.step_folder(root, 6))


def test_changed_model_is_an_error_not_damage(manager: CheckpointManager) -> None:
    manager.save(3, make_state())
    other = make_state()
    other["model"].a = nn.Linear(5, 3)
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    with pytest.raises(CheckpointError, match=r"model/a\.weight has shape \(3, 4\), but \(3, 5\) in this run"):
        manager.restore(other)
    with_ema = {**make_state(), "ema": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="contains no state ema"):
        manager.restore(with_ema)
    fewer = make_state()
    fewer["model"].norm = nn.Identity()
    fewer["optimizer"] = torch.optim.AdamW(fewer["model"].parameters())
    with pytest.raises(CheckpointError, match="which the model does not have"):
        manager.restore(fewer)


def test_optimizer_over_foreign_parameters_is_refused(manager: CheckpointManager) -> None:
    state = make_state()
    state["optimizer"] = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="of no module in the state"):
        manager.save(1, state)


def test_newer_format_is_refused(manager: CheckpointManager, root: Path) -> None:
    manager.save(3, make_state())
    marker = index.step_folder(root, 3) / "COMMITTED"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="written in format 99"):
        manager.restore(make_state())


def test_retention_keeps_newest_and_newest_valid(manager: CheckpointManager, root: Path) -> None:
    for step in range(1, 6):
        manager.save(step, make_state())
    assert [index.parse_step(p) for p in index.list_checkpoint_folders(root)] == [3, 4, 5]
    for step in (4, 5):
        os.truncate(index.step_folder(root, step) / "rank-0.bin", 8)
    assert [p.name for p in inspect.prune(root, 1)] == ["step-00000004"]
    assert [index.parse_step(p) for p in index.list_checkpoint_folders(root)] == [3, 5]


def test_prune_detects_a_flipped_byte(manager: CheckpointManager, root: Path) -> None:
    for step in (1, 2):
        manager.save(step, make_state())
    flip(index.step_folder(root, 2) / "rank-0.bin")
    assert inspect.prune(root, 1) == []


def test_full_disk_keeps_older_checkpoint_and_cleans_up(
    manager: CheckpointManager, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.save(3, make_state())

    def full(file: direct_io.DirectWriter, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(direct_io.DirectWriter, "write", full)
        with pytest.raises(CheckpointError, match=r"step 6 was not saved: rank 0: .*No space left"):
            manager.save(6, make_state())
    assert sorted(p.name for p in root.iterdir()) == ["step-00000003"]
    manager.save(6, make_state())
    inspect.verify(index.step_folder(root, 6))


def failing(original: Any, number: int, times: int) -> Any:
    """Return ``original``, which first fails ``times`` times with errno ``number``."""
    remaining = [times]

    def call(*args: Any, **kw: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] >= 0:
            raise OSError(number, os.strerror(number))
        return original(*args, **kw)

    return call


@pytest.mark.parametrize(
    ("target", "name"), [(os, "preadv"), (Path, "iterdir"), (Path, "read_bytes"), (Path, "stat")], ids=str
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_file_system_error_is_not_damage(
    manager: CheckpointManager, root: Path, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, number: int
) -> None:
    manager.save(3, make_state())
    manager.save(6, make_state())
    monkeypatch.setattr(storage_errors, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(folders, "sweep", lambda root, fence: None)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing(getattr(target, name), number, 10**6))
        with pytest.raises(StorageError, match=os.strerror(number)) as e:
            manager.restore(make_state())
        assert not e.value.full
    assert index.list_damaged_folders(root) == []
    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing(getattr(target, name), number, 2))
        restored = manager.restore(make_state())
    assert restored is not None
    assert (restored.step, restored.skipped) == (6, [])


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EIO, False), (errno.ESTALE, False)])
def test_failed_save_reports_whether_retry_would_fail(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, number: int, full: bool
) -> None:
    monkeypatch.setattr(direct_io.DirectWriter, "write", failing(direct_io.DirectWriter.write, number, 1))
    with pytest.raises(StorageError, match="step 6 was not saved") as e:
        manager.save(6, make_state())
    assert e.value.full is full


def test_unreadable_checkpoint_is_listed_and_blocks_prune(
    manager: CheckpointManager, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 6):
        manager.save(step, make_state())
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO, 10**6))
    row = inspect.list_checkpoints(root, verify=True)[1]
    assert (row["verified"], "damage" in row) == (None, False)
    assert "rank-0.bin" in row["unreadable"]
    with pytest.raises(StorageError):
        inspect.prune(root, 1)
    assert len(index.list_checkpoint_folders(root)) == 2


class Killed(BaseException):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, n: int) -> list[str]:
    """Raise ``Killed`` from the ``n``-th change to the disk on; return the list of changes made so far."""
    changes: list[str] = []

    def guard(target: Any, name: str) -> None:
        original = getattr(target, name)

        def call(*args: Any, **kw: Any) -> Any:
            if len(changes) >= n:
                raise Killed
            changes.append(name)
            return original(*args, **kw)

        monkeypatch.setattr(target, name, call)

    guard(os, "write")
    guard(os, "pwrite")
    guard(os, "fsync")
    guard(os, "mkdir")
    guard(os, "rename")
    guard(os, "replace")
    guard(os, "unlink")
    guard(shutil, "rmtree")
    return changes


@pytest.mark.long
@pytest.mark.parametrize("same_step", [False, True])
def test_kill_at_any_disk_change_leaves_a_valid_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch, same_step: bool
) -> None:
    step, n = (3 if same_step else 6), 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        first = CheckpointManager(
            root, Ranks(), CheckpointConfig(attempt="1", layout={}, policy=RetentionPolicy(keep=1), async_save=False)
        )
        first.save(3, make_state(1))
        old = inspect.digest(inspect.find_checkpoint(root))
        with monkeypatch.context() as patch:
            changes = kill_at(patch, n)
            try:
                first.save(step, make_state(2))
                finished = True
            except Killed:
                finished = False
        new_state = make_state(5)
        second = CheckpointManager(
            root, Ranks(), CheckpointConfig(attempt="2", layout={}, policy=RetentionPolicy(keep=1), async_save=False)
        )
        restored = second.restore(new_state)
        assert restored is not None, f"after {changes}"
        assert restored.skipped == []
        digest = inspect.digest(restored.path)
        assert restored.step in (3, step)
        if finished:
            assert digest != old
            break
        assert not [p for p in root.iterdir() if p.name.startswith(".")], f"after {changes}"
        n += 1
    assert n > 10


def test_list_verify_digest_and_find(manager: CheckpointManager, root: Path) -> None:
    assert inspect.list_checkpoints(root) == []
    with pytest.raises(NotFound, match="existing steps: none"):
        inspect.find_checkpoint(root)
    state = make_state()
    manager.save(3, state)
    train(state)
    manager.save(6, state)
    rows = inspect.list_checkpoints(root, verify=True)
    assert [(r["step"], r["committed"], r["verified"], r["engine"], r["world_size"]) for r in rows] == [
        (3, True, True, "raw", 1),
        (6, True, True, "raw", 1),
    ]
    assert rows[0]["layout"] == {"strategy": "single"}
    assert rows[0]["bytes"] == sum(p.stat().st_size for p in Path(rows[0]["path"]).iterdir())
    assert inspect.list_checkpoints(root)[0]["verified"] is None
    assert inspect.find_checkpoint(root) == index.step_folder(root, 6)
    assert inspect.digest(inspect.find_checkpoint(root, 3)) != inspect.digest(inspect.find_checkpoint(root, 6))
    with pytest.raises(NotFound, match="step 5; existing steps: 3, 6"):
        inspect.find_checkpoint(root, 5)
    flip(index.step_folder(root, 3) / "rank-0.bin")
    assert inspect.list_checkpoints(root)[0]["verified"] is None
    row = inspect.list_checkpoints(root, verify=True)[0]
    assert row["verified"] is False
    assert "rank-0.bin" in row["damage"]
    with pytest.raises(DamagedCheckpoint, match=r"rank-0\.bin"):
        inspect.digest(index.step_folder(root, 3))


def test_digest_covers_only_tensors(manager: CheckpointManager, root: Path) -> None:
    manager.save(1, make_state(), {"random": 1})
    manager.save(2, {**make_state(), "note": "another"}, {"random": 2})
    assert inspect.digest(inspect.find_checkpoint(root, 1)) == inspect.digest(inspect.find_checkpoint(root, 2))


def test_checkpoint_is_group_readable_if_the_run_is(manager: CheckpointManager, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o750)
    before = os.umask(0o022)
    try:
        folder = manager.save(3, make_state()).path
    finally:
        os.umask(before)
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {
        "rank-0.bin": 0o640,
        "manifest.json": 0o640,
        "COMMITTED": 0o640,
    }
    assert [stat.S_IMODE(p.stat().st_mode) for p in (root, folder)] == [0o750, 0o750]


@pytest.mark.long
def test_checkpoint_command_does_not_import_torch() -> None:
    code = "import sys, clustertrain.cli.checkpoint; sys.exit('torch' in sys.modules)"
    from clustertrain import proc

    proc.run([__import__("sys").executable, "-c", code])

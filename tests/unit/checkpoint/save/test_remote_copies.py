"""Copies of a run's checkpoints behind a URL: retried until they are complete, and restored from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock, settings
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format import storage_errors
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load.restore import RemoteTier
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save import pending_saves
from clustertrain.checkpoint.save.remote import ANNOUNCEMENT_FILE
from clustertrain.checkpoint.save.writer_jobs import JobOutcome
from tests.unit.checkpoint.saved import files, save, state_of, steps

pytestmark = pytest.mark.long

LONG_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def remote_root(tmp_path: Path) -> Path:
    """The folder behind the URL."""
    return tmp_path / "store" / "run-1"


@pytest.fixture
def outcomes() -> list[JobOutcome]:
    return []


@pytest.fixture
def make(
    root: Path, remote_root: Path, outcomes: list[JobOutcome], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CheckpointManager]]:
    """Return a function that makes a manager, whose writer meets ``fault``, and restores into ``state``."""
    managers = []

    def make(*, fault: str = "", keep: int = 2, needed: bool = False, state: Any = None, **changes: Any) -> Any:
        options: dict[str, Any] = {"attempt": "1", "layout": {}, "policy": RetentionPolicy(keep=2), **changes}
        url = RemoteTier(f"file://{remote_root}", RetentionPolicy(keep=keep), needed)
        manager = CheckpointManager(root, Ranks(), CheckpointConfig(remote=url, **options), on_copy=outcomes.append)
        if fault:
            monkeypatch.setenv(settings.FAULT_AT, fault)
        manager.start()
        monkeypatch.delenv(settings.FAULT_AT, raising=False)
        managers.append(manager)
        manager.restored = manager.restore(state if state is not None else state_of(0.0))  # type: ignore[attr-defined]
        return manager

    yield make
    for manager in managers:
        manager.close()


def wait_for_copies(manager: CheckpointManager) -> bool:
    deadline = clock.monotonic() + LONG_S
    return manager.wait_for_copies(lambda: clock.monotonic() < deadline)


@pytest.mark.parametrize(
    "engine", ["raw", *(pytest.param(name, marks=pytest.mark.ranks) for name in ("dcp", "torchsnapshot"))]
)  # the writer processes of the other two engines import torch
def test_run_restores_from_identical_copies(
    make: Callable[..., Any], root: Path, remote_root: Path, outcomes: list[JobOutcome], engine: str
) -> None:
    manager = make(engine=engine)
    for step in (3, 6):
        manager.save(step, state_of(float(step)), wait=True)
        assert wait_for_copies(manager)
    assert [(o.step, o.failure) for o in outcomes] == [(3, None), (6, None)]
    assert [o.bytes for o in outcomes] == [index.read_manifest(p).bytes for p in index.list_checkpoint_folders(root)]
    assert files(remote_root) == {k: v for k, v in files(root).items() if k != ANNOUNCEMENT_FILE}
    manager.close()
    shutil.rmtree(root)
    state = state_of(0.0)
    second = make(attempt="2", state=state, engine=engine)
    assert str(second.restored.path) == f"file://{remote_root}/step-00000006"
    assert (second.restored.step, state["note"], float(state["weights"].sum())) == (6, 6.0, 6000.0)
    second.save(9, state_of(9.0), wait=True)
    assert wait_for_copies(second)
    assert steps(remote_root) == [6, 9]


def test_remote_copies_follow_their_own_keep(make: Callable[..., Any], root: Path, remote_root: Path) -> None:
    manager = make(keep=1)
    for step in (3, 6, 9):
        manager.save(step, state_of(float(step)), wait=True)
        assert wait_for_copies(manager)
    assert (steps(root), steps(remote_root)) == ([6, 9], [9])
    inspect.verify(inspect.find_checkpoint(remote_root))


def test_failed_upload_is_retried_while_training_continues(
    make: Callable[..., Any], root: Path, remote_root: Path, outcomes: list[JobOutcome]
) -> None:
    remote_root.parent.write_text("a file in place of the folder")
    manager = make()
    manager.save(3, state_of(3.0), wait=True)
    assert clock.wait_until(lambda: (manager.poll(), bool(outcomes))[1], LONG_S)
    assert "retry in 1 s" in outcomes[0].failure.message  # type: ignore[union-attr]
    manager.save(6, state_of(6.0), wait=True)
    remote_root.parent.unlink()
    assert wait_for_copies(manager)
    assert steps(remote_root) == [3, 6]
    assert [o.step for o in outcomes if o.failure is None] == [6, 3]  # the newest first
    for folder in index.list_checkpoint_folders(remote_root):
        inspect.verify(folder)


@pytest.mark.parametrize("point", ["during_upload", "before_remote_commit_marker"])
def test_next_attempt_completes_upload_after_kill(
    make: Callable[..., Any], root: Path, remote_root: Path, point: str
) -> None:
    manager = make(fault=f"{point}:0:1:KILL")
    manager.save(3, state_of(3.0), wait=True)
    assert clock.wait_until(lambda: (manager.poll(), not manager._pending.worker.is_alive)[1], LONG_S)
    assert [p for p in index.list_checkpoint_folders(remote_root) if index.has_commit_marker(p)] == []
    manager.close()
    second = make(attempt="2")
    assert second.restored.path == root / "step-00000003"
    assert wait_for_copies(second)  # without a save
    assert files(remote_root / "step-00000003") == files(root / "step-00000003")


def test_replacement_writer_completes_the_upload(make: Callable[..., Any], root: Path, remote_root: Path) -> None:
    manager = make(fault="during_upload:0:1:KILL")
    manager.save(3, state_of(3.0), wait=True)
    assert wait_for_copies(manager)
    assert files(remote_root / "step-00000003") == files(root / "step-00000003")


def test_wait_for_copies_at_end_of_run_is_bounded(
    make: Callable[..., Any], remote_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_root.parent.write_text("a file in place of the folder")
    manager = make()
    manager.save(3, state_of(3.0), wait=True)
    assert not manager.wait_for_copies(lambda: False)  # asked to stop
    monkeypatch.setattr(pending_saves, "COPY_FAILURE_TIMEOUT_S", 0.5)
    assert not manager.wait_for_copies(lambda: True)
    process = manager._pending.worker._process
    manager.close()
    assert process.returncode == 0


def test_writer_without_url_does_not_import_fsspec() -> None:
    module = "clustertrain.checkpoint.save.writer_process"
    code = f"import sys, {module}; sys.exit('fsspec' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _flip(path: Path, at: int = 20) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "restored", "skipped"),
    [
        ("", "shared/step-00000006", []),
        ("shared/step-00000006/rank-0.bin", "run-1/step-00000006", [6]),
        ("shared/step-00000006", "run-1/step-00000006", []),
        ("run-1/step-00000006/rank-0.bin shared/step-00000006", "shared/step-00000003", [6]),
        ("run-1/step-00000006/COMMITTED shared/step-00000006", "shared/step-00000003", []),
    ],
)
def test_newest_valid_is_restored_from_either_place(
    make: Callable[..., Any], root: Path, remote_root: Path, damage: str, restored: str, skipped: list[int]
) -> None:
    for step in (3, 6):
        save(root, step, state_of(float(step)))
    shutil.copytree(root, remote_root)
    for name in damage.split():
        path = (remote_root.parent if name.startswith("run") else root.parent) / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name == "COMMITTED":
            path.unlink()
        else:
            _flip(path)
    manager = make(attempt="2", keep=9)
    assert str(manager.restored.path).endswith(restored)
    assert [s["step"] for s in manager.restored.skipped] == skipped
    assert wait_for_copies(manager)
    # A damaged copy is replaced as soon as the shared folder has the step again.
    manager.save(6, state_of(6.0), wait=True)
    markers = [folder / "step-00000006" / index.COMMITTED for folder in (root, remote_root)]
    assert clock.wait_until(lambda: markers[1].exists() and markers[1].read_bytes() == markers[0].read_bytes(), LONG_S)
    for folder in (*index.list_checkpoint_folders(root), *index.list_checkpoint_folders(remote_root)):
        inspect.verify(folder)


def test_unreachable_store_matters_only_if_needed(
    make: Callable[..., Any], root: Path, remote_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)

    def fail(self: RemoteFolder) -> Any:
        raise PermissionError(13, "access denied")

    monkeypatch.setattr(RemoteFolder, "iterdir", fail)
    with pytest.raises(StorageError, match=r"the checkpoints cannot be listed.*run-1: access denied"):
        make(needed=True)
    assert make().restored is None
    save(root, 3, state_of(3.0))
    assert make(needed=True).restored.step == 3
    assert [r.message.endswith("access denied; its checkpoints are ignored") for r in caplog.records] == [True] * 2

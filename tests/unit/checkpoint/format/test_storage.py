"""Checkpoints behind URLs are read like those in folders."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format import storage_errors
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load.reader import CheckpointReader
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import ConfigError, NotFound
from tests.unit.checkpoint.saved import save


def state(fill: float) -> dict[str, Any]:
    # Several blocks, so that a part of the tensor is a range of the file.
    return {"a": torch.full((3, 700_001), fill), "b": torch.arange(5), "none": torch.zeros(0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "with space é" / "checkpoints"
    for step in (3, 6):
        save(root, step, state(float(step)))
    return root


def open_remote(root: Path, protocol: str) -> RemoteFolder:
    """Return the checkpoints of ``root`` behind a URL."""
    if protocol == "file":
        return RemoteFolder(f"file://{root}/")
    memory = fsspec.filesystem("memory")
    memory.rm("/bucket", recursive=True) if memory.exists("/bucket") else None
    memory.put(str(root), "/bucket/run", recursive=True)
    return RemoteFolder("memory://bucket/run")


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_offline_functions_agree_for_url_and_folder(root: Path, protocol: str) -> None:
    remote_root = open_remote(root, protocol)
    assert [p.name for p in index.list_checkpoint_folders(remote_root)] == ["step-00000003", "step-00000006"]
    assert str(inspect.find_checkpoint(remote_root)) == f"{remote_root}/step-00000006"
    assert inspect.digest(inspect.find_checkpoint(remote_root, 3)) == inspect.digest(inspect.find_checkpoint(root, 3))
    remote_rows, local_rows = (
        inspect.list_checkpoints(remote_root, verify=True),
        inspect.list_checkpoints(root, verify=True),
    )
    assert [r.pop("path") for r in remote_rows] == [f"{remote_root}/step-{s:08d}" for s in (3, 6)]
    assert remote_rows == [{k: v for k, v in r.items() if k != "path"} for r in local_rows]
    with pytest.raises(NotFound, match="no committed checkpoint of step 5; existing steps: 3, 6"):
        inspect.find_checkpoint(remote_root, 5)
    with pytest.raises(NotFound, match="existing steps: none"):
        inspect.find_checkpoint(RemoteFolder(f"{remote_root}/nothing"))


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_tensors_are_read_by_range(root: Path, protocol: str) -> None:
    folder = inspect.find_checkpoint(open_remote(root, protocol))
    loaded = state(0.0)
    reader = CheckpointReader(folder, index.read_manifest(folder))
    finish = reader.load(loaded)
    reader.complete()
    finish()
    reader.close()
    assert all(torch.equal(loaded[k], v) for k, v in state(6.0).items())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: _flip(f / "rank-0.bin"), "rank-0.bin: checksum of bytes 0 to 4194304 differs"),
        (lambda f: (f / "rank-0.bin").write_bytes(b"1234"), "rank-0.bin: has 4 bytes, "),
        (lambda f: (f / "rank-0.bin").unlink(), "rank-0.bin: is missing"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: _flip(f / "manifest.json"), "manifest.json: checksum differs"),
        (lambda f: (f / "COMMITTED").unlink(), "COMMITTED is missing"),
    ],
)
def test_damage_behind_url_is_found(root: Path, damage: Any, reason: str) -> None:
    remote_root = open_remote(root, "file")
    damage(root / "step-00000006")
    with pytest.raises(DamagedCheckpoint) as e:
        inspect.verify(index.step_folder(remote_root, 6))
    assert f"{remote_root}/step-00000006" in e.value.message
    assert reason in e.value.message
    assert reason in inspect.find_damage(index.step_folder(remote_root, 6))[0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


class NoCredentialsError(Exception):
    """Stand-in for botocore's, which is not an OSError either."""


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (NoCredentialsError("Unable to locate credentials"), "access denied: NoCredentialsError: Unable to locate"),
        (PermissionError("Forbidden"), "access denied: Forbidden (the job needs credentials"),
        (RuntimeError("bad gateway"), "RuntimeError: bad gateway"),
        (OSError(errno.ESTALE, "Stale file handle"), "Stale file handle"),
    ],
)
def test_library_error_becomes_storage_error_not_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, reason: str
) -> None:
    folder = index.step_folder(open_remote(root, "file"), 6)
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)

    def fail(*args: Any, **kw: Any) -> bytes:
        raise raised

    monkeypatch.setattr(LocalFileSystem, "cat_file", fail)
    with pytest.raises(StorageError) as e:
        inspect.verify(folder)
    assert e.value.message.startswith(f"{folder}/COMMITTED: {reason}")


def test_transient_store_error_is_retried(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index.step_folder(open_remote(root, "file"), 6)
    monkeypatch.setattr(storage_errors, "RETRY_INTERVAL_S", 0.01)
    original, failures = LocalFileSystem.cat_file, [RuntimeError("slow down"), RuntimeError("slow down")]

    def fail_twice(*args: Any, **kw: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*args, **kw)

    monkeypatch.setattr(LocalFileSystem, "cat_file", fail_twice)
    inspect.verify(folder)
    assert failures == []


def test_write_read_and_delete(tmp_path: Path) -> None:
    file = RemoteFolder(f"file://{tmp_path}") / "run" / "step-00000001" / "a"
    file.write_bytes(b"first")
    file.write_bytes(b"second")
    assert (file.read_bytes(), file.stat().st_size, file.parent.is_dir(), file.is_dir()) == (b"second", 6, True, False)
    assert file.parent.sizes() == {"a": 6}
    file.unlink()
    file.unlink()
    file.parent.rmtree()
    file.parent.rmtree()
    assert [p.name for p in file.parent.parent.iterdir()] == []
    assert not file.parent.is_dir()


@pytest.mark.parametrize(
    ("url", "hidden", "reason", "fix"),
    [
        ("s3://bucket/x", "s3fs", "the package for s3:// is not installed", "clustertrain[object-storage]"),
        (
            "s3://bucket/x",
            "fsspec",
            "the package fsspec is not installed",
            "pip install 'clustertrain[object-storage]'",
        ),
        ("s4://bucket/x", "", "fsspec does not know the protocol s4://", "s3://bucket/prefix"),
    ],
)
def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, hidden: str, reason: str, fix: str
) -> None:
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(ConfigError) as e:
        RemoteFolder(url)
    assert reason in e.value.message
    assert fix in str(e.value.fix)


def test_local_path_needs_no_package(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert inspect.verify(inspect.find_checkpoint(root)).step == 6

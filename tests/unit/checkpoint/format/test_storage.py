"""Checkpoints behind URLs are read as those in folders are."""

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
    # Of several blocks, so that a part of it is a range of the file.
    return {"a": torch.full((3, 700_001), fill), "b": torch.arange(5), "none": torch.zeros(0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "with space é" / "checkpoints"
    for step in (3, 6):
        save(root, step, state(float(step)))
    return root


def behind(root: Path, protocol: str) -> RemoteFolder:
    """The same checkpoints behind a URL."""
    if protocol == "file":
        return RemoteFolder(f"file://{root}/")
    memory = fsspec.filesystem("memory")
    memory.rm("/bucket", recursive=True) if memory.exists("/bucket") else None
    memory.put(str(root), "/bucket/run", recursive=True)
    return RemoteFolder("memory://bucket/run")


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_offline_functions_say_the_same_of_a_url(root: Path, protocol: str) -> None:
    there = behind(root, protocol)
    assert [p.name for p in index.list_checkpoint_folders(there)] == ["step-00000003", "step-00000006"]
    assert str(inspect.find_checkpoint(there)) == f"{there}/step-00000006"
    assert inspect.digest(inspect.find_checkpoint(there, 3)) == inspect.digest(inspect.find_checkpoint(root, 3))
    rows, here = inspect.list_checkpoints(there, verify=True), inspect.list_checkpoints(root, verify=True)
    assert [r.pop("path") for r in rows] == [f"{there}/step-{s:08d}" for s in (3, 6)]
    assert rows == [{k: v for k, v in r.items() if k != "path"} for r in here]
    with pytest.raises(NotFound, match="no committed checkpoint of step 5; existing steps: 3, 6"):
        inspect.find_checkpoint(there, 5)
    with pytest.raises(NotFound, match="existing steps: none"):
        inspect.find_checkpoint(RemoteFolder(f"{there}/nothing"))


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_tensors_are_read_by_ranges(root: Path, protocol: str) -> None:
    folder = inspect.find_checkpoint(behind(root, protocol))
    new = state(0.0)
    reader = CheckpointReader(folder, index.read_manifest(folder))
    finish = reader.load(new)
    reader.complete()
    finish()
    reader.close()
    assert all(torch.equal(new[k], v) for k, v in state(6.0).items())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: _flip(f / "rank-0.bin"), "rank-0.bin: checksum of bytes 0 to 4194304 differs"),
        (lambda f: (f / "rank-0.bin").write_bytes(b"1234"), "rank-0.bin: has 4 bytes, "),
        (lambda f: (f / "rank-0.bin").unlink(), "rank-0.bin: is missing"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: _flip(f / "manifest.json"), "manifest.json: checksum differs"),
        (lambda f: (f / "COMMITTED").unlink(), "COMMITTED is missing"),
    ],
)
def test_damage_there_is_seen(root: Path, damage: Any, said: str) -> None:
    there = behind(root, "file")
    damage(root / "step-00000006")
    with pytest.raises(DamagedCheckpoint) as e:
        inspect.verify(index.step_folder(there, 6))
    assert f"{there}/step-00000006" in e.value.message
    assert said in e.value.message
    assert said in inspect.find_damage(index.step_folder(there, 6))[0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


class NoCredentialsError(Exception):
    """As botocore's, which is no OSError either."""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (NoCredentialsError("Unable to locate credentials"), "access denied: NoCredentialsError: Unable to locate"),
        (PermissionError("Forbidden"), "access denied: Forbidden (the job needs credentials"),
        (RuntimeError("bad gateway"), "RuntimeError: bad gateway"),
        (OSError(errno.ESTALE, "Stale file handle"), "Stale file handle"),
    ],
)
def test_what_a_library_raises_becomes_a_clear_sentence_and_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    folder = index.step_folder(behind(root, "file"), 6)
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)

    def fail(*args: Any, **kw: Any) -> bytes:
        raise raised

    monkeypatch.setattr(LocalFileSystem, "cat_file", fail)
    with pytest.raises(StorageError) as e:
        inspect.verify(folder)
    assert e.value.message.startswith(f"{folder}/COMMITTED: {said}")


def test_a_moment_without_the_store_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index.step_folder(behind(root, "file"), 6)
    monkeypatch.setattr(storage_errors, "RETRY_INTERVAL_S", 0.01)
    original, failures = LocalFileSystem.cat_file, [RuntimeError("slow down"), RuntimeError("slow down")]

    def sometimes(*args: Any, **kw: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*args, **kw)

    monkeypatch.setattr(LocalFileSystem, "cat_file", sometimes)
    inspect.verify(folder)
    assert failures == []


def test_what_is_written_is_read_and_goes(tmp_path: Path) -> None:
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
    ("url", "hidden", "said", "fix"),
    [
        ("s3://bucket/x", "s3fs", "the package for s3:// is not installed", "clustertrain[object-storage]"),
        ("s3://bucket/x", "fsspec", "needs the package fsspec", "pip install 'clustertrain[object-storage]'"),
        ("s4://bucket/x", "", "fsspec does not know the protocol s4://", "s3://bucket/prefix"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, hidden: str, said: str, fix: str
) -> None:
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(ConfigError) as e:
        RemoteFolder(url)
    assert said in e.value.message
    assert fix in str(e.value.fix)


def test_a_path_needs_no_package(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert inspect.verify(inspect.find_checkpoint(root)).step == 6

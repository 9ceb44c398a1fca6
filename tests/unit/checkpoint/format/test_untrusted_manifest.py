"""A checkpoint from an untrusted source: nothing in it is ever unpickled, whichever file holds the pickle."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import diff, inspect
from clustertrain.checkpoint.save.engines import ENGINES
from clustertrain.errors import CheckpointError, ClusterTrainError


class Bomb:
    """An object whose unpickling creates a folder."""

    def __init__(self, at: Path) -> None:
        self._at = at

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._at),)


def make(root: Path, engine: str) -> Path:
    manager = CheckpointManager(
        root, Ranks(), CheckpointConfig(attempt="1", layout={}, engine=engine, async_save=False)
    )
    saved = manager.save(3, {"model": torch.nn.Linear(3, 3), "note": "x"})
    assert saved is not None
    return saved.path


def restore(root: Path) -> object:
    reader = CheckpointManager(root, Ranks(), CheckpointConfig(attempt="2", layout={}, async_save=False))
    return reader.restore({"model": torch.nn.Linear(3, 3), "note": ""})


def read_with_every_reader(root: Path, folder: Path) -> None:
    readers: list[Callable[[], object]] = [
        lambda: inspect.list_checkpoints(root, verify=True),
        lambda: inspect.verify(folder),
        lambda: inspect.digest(folder),
        lambda: diff.compare_checkpoints(folder, folder),
        lambda: restore(root),
    ]
    for read in readers:
        with suppress(ClusterTrainError):
            read()


@pytest.mark.parametrize("engine", ENGINES)
def test_pickle_in_place_of_any_file_is_never_run(tmp_path: Path, engine: str) -> None:
    names = sorted(
        str(p.relative_to(f)) for f in [make(tmp_path / "kept", engine)] for p in f.rglob("*") if p.is_file()
    )
    assert {"COMMITTED", "manifest.json"} < set(names)
    exploded = tmp_path / "exploded"
    for n, name in enumerate(names):
        folder = make(tmp_path / f"kept-{n}", engine)
        data = pickle.dumps(Bomb(exploded))
        (folder / name).write_bytes(data)
        read_with_every_reader(folder.parent, folder)
        assert not exploded.exists(), name


def test_manifest_with_foreign_names_is_refused(tmp_path: Path) -> None:
    """Anyone can write a manifest with a valid checksum: it must not make a reader run code or read other files."""
    folder = make(tmp_path / "kept", "raw")
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 1000)
    manifest = index.read_manifest(folder)
    shard = msgspec.structs.replace(manifest.tensors[0].shards[0], file="../../secret")
    tensor = msgspec.structs.replace(manifest.tensors[0], shards=(shard,))
    evil = msgspec.structs.replace(manifest, tensors=(tensor, *manifest.tensors[1:]))
    index.write_manifest(folder, evil)
    with pytest.raises(index.DamagedCheckpoint, match="outside"):
        inspect.verify(folder)
    index.write_manifest(folder, msgspec.structs.replace(manifest, files={"/etc/passwd": 10}))
    with pytest.raises(index.DamagedCheckpoint, match="outside"):
        inspect.verify(folder)
    bad = msgspec.structs.replace(manifest.tensors[0], dtype="load")
    index.write_manifest(folder, msgspec.structs.replace(manifest, tensors=(bad, *manifest.tensors[1:])))
    with pytest.raises(CheckpointError, match="'load' is not a dtype"):
        restore(tmp_path / "kept")

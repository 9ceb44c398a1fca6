"""An inconsistent manifest with a valid checksum: verify, digest, diff, export, list and restore all report damage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format import manifest_checks
from clustertrain.checkpoint.format.manifest import Manifest, TensorRecord
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.cli.main import cli
from clustertrain.errors import ClusterTrainError
from tests.unit.checkpoint.saved import save, state_of

replace = msgspec.structs.replace
Change = Callable[[Manifest], Manifest]


def tensor(**fields: Any) -> Change:
    return lambda m: replace(m, tensors=(replace(m.tensors[0], **fields), *m.tensors[1:]))


def shard(**fields: Any) -> Change:
    def change(m: Manifest) -> Manifest:
        first = m.tensors[0]
        return tensor(shards=(replace(first.shards[0], **fields), *first.shards[1:]))(m)

    return change


def shards(make: Callable[[TensorRecord], Any]) -> Change:
    return lambda m: tensor(shards=make(m.tensors[0]))(m)


CHANGES: dict[str, Change] = {
    "no shards": tensor(shards=()),
    "duplicate shards": shards(lambda t: (*t.shards, *t.shards)),
    "other shape": tensor(shape=(999,)),
    "more dimensions": tensor(shape=(1000, 1)),
    "negative shape": tensor(shape=(-1000,)),
    "other item size": tensor(itemsize=2),
    "zero item size": tensor(itemsize=0),
    "dtype of other size": tensor(dtype="float64"),
    "shard beyond the shape": shard(start=(1,)),
    "missing checksum": shard(blocks=""),
    "partial checksum": shard(blocks="0" * 8),
    "duplicate tensor": lambda m: replace(m, tensors=(*m.tensors, m.tensors[0])),
    "value without its tensor": lambda m: replace(m, values={**m.values, "weights": {"__tensor__": "lost"}}),
    "tensor name that is a list": lambda m: replace(m, values={**m.values, "weights": {"__tensor__": []}}),
    "other step": lambda m: replace(m, step=7),
    "file name with NUL": lambda m: replace(m, files={**m.files, "a\0b": 0}),
    "negative file size": lambda m: replace(m, files={**m.files, "x": -1}),
}


def run(*argv: str) -> tuple[int, str]:
    result = click.testing.CliRunner().invoke(cli, list(argv), standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, ClusterTrainError):
        raise result.exception
    return (1 if result.exception else int(result.return_value or 0)), f"{result.output}{result.exception or ''}"


def edit_manifest(folder: Path, change: Change) -> None:
    data = msgspec.json.encode(change(index.read_manifest(folder)))
    marker = {
        "format": index.FORMAT_VERSION,
        "step": index.parse_step(folder),
        "manifest_xxh3_128": index.checksum(data),
    }
    (folder / index.MANIFEST).write_bytes(data)
    (folder / index.COMMITTED).write_bytes(msgspec.json.encode(marker))


@pytest.mark.parametrize("change", CHANGES)
def test_all_readers_report_inconsistent_manifest_as_damage(change: str, tmp_path: Path) -> None:
    good, bad = save(tmp_path, 1, state_of(1.0)), save(tmp_path, 2, state_of(2.0))
    edit_manifest(bad, CHANGES[change])
    code, output = run("checkpoint", "verify", str(bad))
    assert code == 1 and "DAMAGED" in output
    for argv in (
        ("checkpoint", "digest", str(bad), "--of", "all"),
        ("checkpoint", "diff", str(good), str(bad)),
        ("checkpoint", "export", str(bad), "-o", str(tmp_path / "out")),
    ):
        code, output = run(*argv)
        assert code == 1 and str(bad) in output and "contains no model" not in output, argv
    code, output = run("checkpoint", "list", str(tmp_path), "--json")
    rows = msgspec.json.decode(output)["checkpoints"]
    assert code == 0 and [row["verified"] for row in rows] == [None, False] and rows[1]["damage"]
    state = state_of(0.0)
    CheckpointManager(tmp_path, Ranks(), CheckpointConfig(attempt="2", layout={}, async_save=False)).restore(state)
    assert state["note"] == 1.0  # from step 1


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("COMMITTED", b"\xff\xfe"),
        ("COMMITTED", b"[" * 100_000),
        ("COMMITTED", b'{"format": 2, "step": 2, "manifest_xxh3_128": "\x80"}'),
        ("manifest.json", b"[" * 100_000),
        ("manifest.json", b'{"a":' * 5000 + b"}" * 5000),
    ],
    ids=["not Unicode", "nested marker", "not Unicode in JSON", "nested manifest", "nested invalid manifest"],
)
def test_unparsable_files_are_damage(file: str, content: bytes, tmp_path: Path) -> None:
    save(tmp_path, 1, state_of(1.0))
    bad = save(tmp_path, 2, state_of(2.0))
    (bad / file).write_bytes(content)
    if file == "manifest.json":
        marker = {"format": index.FORMAT_VERSION, "step": 2, "manifest_xxh3_128": index.checksum(content)}
        (bad / index.COMMITTED).write_bytes(msgspec.json.encode(marker))
    code, output = run("checkpoint", "list", str(tmp_path), "--json")
    rows = msgspec.json.decode(output)["checkpoints"]
    assert code == 0 and rows[1]["verified"] is False and file in rows[1]["damage"]
    assert run("checkpoint", "verify", str(bad))[0] == 1


@pytest.mark.parametrize("file", ["manifest.json", "rank-0.bin"])
def test_pipe_in_place_of_file_is_damage(file: str, tmp_path: Path) -> None:
    bad = save(tmp_path, 2, state_of(2.0))
    (bad / file).unlink()
    os.mkfifo(bad / file)
    code, output = run("checkpoint", "verify", str(bad))
    assert code == 1 and file in output and "regular file" in output


@pytest.mark.parametrize("file", ["COMMITTED", "manifest.json", "rank-0.bin"])
def test_link_to_itself_hides_no_other_checkpoint(file: str, tmp_path: Path) -> None:
    bad, good = save(tmp_path, 1, state_of(1.0)), save(tmp_path, 2, state_of(2.0))
    (bad / file).unlink()
    (bad / file).symlink_to(file)
    code, output = run("checkpoint", "list", str(tmp_path), "--json")
    assert code == 0 and [row["path"] for row in msgspec.json.decode(output)["checkpoints"]] == [str(bad), str(good)]


GRID = [((i, j), (2, 3)) for i in range(0, 8, 2) for j in range(0, 9, 3)]
PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(
    ("shape", "boxes", "fits"),
    [
        pytest.param((), [((), ())], True, id="scalar"),
        pytest.param((), [], False, id="scalar without shard"),
        pytest.param((0, 4), [], True, id="empty without shard"),
        pytest.param((0, 4), [((0, 0), (0, 4))], True, id="empty"),
        pytest.param((8, 9), GRID, True, id="grid"),
        pytest.param((8, 9), GRID[1:], False, id="grid with a gap"),
        pytest.param((8, 9), [*GRID[1:], GRID[-1]], False, id="grid with a gap and an overlap"),
        pytest.param((3, 3), PINWHEEL, True, id="pinwheel"),
        pytest.param((4,), [((0,), (2,)), ((1,), (2,))], False, id="overlap in 1D"),
        pytest.param((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], False, id="overlap in 2D"),
    ],
)
def test_shards_must_tile_the_tensor(shape: Any, boxes: list[Any], fits: bool) -> None:
    assert (manifest_checks.find_tiling_error(shape, boxes) is None) is fits

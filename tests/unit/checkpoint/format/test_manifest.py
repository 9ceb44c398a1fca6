"""An index with the right checksum that says what cannot be: verify, digest, diff, export, list and a restore all call
it damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from clustertrain.checkpoint.core.control_group import Ranks
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
    "doubled shards": shards(lambda t: (*t.shards, *t.shards)),
    "another shape": tensor(shape=(999,)),
    "more dimensions": tensor(shape=(1000, 1)),
    "a negative shape": tensor(shape=(-1000,)),
    "another size of an element": tensor(itemsize=2),
    "no size of an element": tensor(itemsize=0),
    "a dtype of another size": tensor(dtype="float64"),
    "a shard beyond the shape": shard(start=(1,)),
    "a checksum too few": shard(blocks=""),
    "half a checksum": shard(blocks="0" * 8),
    "a tensor twice": lambda m: replace(m, tensors=(*m.tensors, m.tensors[0])),
    "a value without its tensor": lambda m: replace(m, values={**m.values, "weights": {"__tensor__": "lost"}}),
    "a tensor's name that is a list": lambda m: replace(m, values={**m.values, "weights": {"__tensor__": []}}),
    "another step": lambda m: replace(m, step=7),
    "a file's name with a NUL": lambda m: replace(m, files={**m.files, "a\0b": 0}),
    "a file of a negative size": lambda m: replace(m, files={**m.files, "x": -1}),
}


def run(*words: str) -> tuple[int, str]:
    done = click.testing.CliRunner().invoke(cli, list(words), standalone_mode=False)
    if done.exception is not None and not isinstance(done.exception, ClusterTrainError):
        raise done.exception
    return (1 if done.exception else int(done.return_value or 0)), f"{done.output}{done.exception or ''}"


def change_index(folder: Path, change: Change) -> None:
    data = msgspec.json.encode(change(index.read_manifest(folder)))
    marker = {
        "format": index.FORMAT_VERSION,
        "step": index.parse_step(folder),
        "manifest_xxh3_128": index.checksum(data),
    }
    (folder / index.MANIFEST).write_bytes(data)
    (folder / index.COMMITTED).write_bytes(msgspec.json.encode(marker))


@pytest.mark.parametrize("what", CHANGES)
def test_all_readers_call_a_wrong_index_damaged(what: str, tmp_path: Path) -> None:
    good, bad = save(tmp_path, 1, state_of(1.0)), save(tmp_path, 2, state_of(2.0))
    change_index(bad, CHANGES[what])
    code, said = run("checkpoint", "verify", str(bad))
    assert code == 1 and "DAMAGED" in said
    for words in (
        ("checkpoint", "digest", str(bad), "--of", "all"),
        ("checkpoint", "diff", str(good), str(bad)),
        ("checkpoint", "export", str(bad), "-o", str(tmp_path / "out")),
    ):
        code, said = run(*words)
        assert code == 1 and str(bad) in said and "contains no model" not in said, words
    code, said = run("checkpoint", "list", str(tmp_path), "--json")
    rows = msgspec.json.decode(said)
    assert code == 0 and [row["verified"] for row in rows] == [None, False] and rows[1]["damage"]
    state = state_of(0.0)
    CheckpointManager(tmp_path, Ranks(), CheckpointConfig(attempt="2", layout={}, async_save=False)).restore(state)
    assert state["note"] == 1.0  # of the one before


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("COMMITTED", b"\xff\xfe"),
        ("COMMITTED", b"[" * 100_000),
        ("COMMITTED", b'{"format": 2, "step": 2, "manifest_xxh3_128": "\x80"}'),
        ("manifest.json", b"[" * 100_000),
        ("manifest.json", b'{"a":' * 5000 + b"}" * 5000),
    ],
)
def test_files_that_are_no_documents_are_damage(file: str, content: bytes, tmp_path: Path) -> None:
    save(tmp_path, 1, state_of(1.0))
    bad = save(tmp_path, 2, state_of(2.0))
    (bad / file).write_bytes(content)
    if file == "manifest.json":
        marker = {"format": index.FORMAT_VERSION, "step": 2, "manifest_xxh3_128": index.checksum(content)}
        (bad / index.COMMITTED).write_bytes(msgspec.json.encode(marker))
    code, said = run("checkpoint", "list", str(tmp_path), "--json")
    rows = msgspec.json.decode(said)
    assert code == 0 and rows[1]["verified"] is False and file in rows[1]["damage"]
    assert run("checkpoint", "verify", str(bad))[0] == 1


@pytest.mark.parametrize("file", ["manifest.json", "rank-0.bin"])
def test_a_pipe_in_place_of_a_file_is_damage(file: str, tmp_path: Path) -> None:
    bad = save(tmp_path, 2, state_of(2.0))
    (bad / file).unlink()
    os.mkfifo(bad / file)
    code, said = run("checkpoint", "verify", str(bad))
    assert code == 1 and file in said and "regular file" in said


@pytest.mark.parametrize("file", ["COMMITTED", "manifest.json", "rank-0.bin"])
def test_a_link_to_itself_hides_no_other_checkpoint(file: str, tmp_path: Path) -> None:
    bad, good = save(tmp_path, 1, state_of(1.0)), save(tmp_path, 2, state_of(2.0))
    (bad / file).unlink()
    (bad / file).symlink_to(file)
    code, said = run("checkpoint", "list", str(tmp_path), "--json")
    assert code == 0 and [row["path"] for row in msgspec.json.decode(said)] == [str(bad), str(good)]


GRID = [((i, j), (2, 3)) for i in range(0, 8, 2) for j in range(0, 9, 3)]
PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(
    ("shape", "boxes", "fits"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((0, 4), [], True),
        ((0, 4), [((0, 0), (0, 4))], True),
        ((8, 9), GRID, True),
        ((8, 9), GRID[1:], False),
        ((8, 9), [*GRID[1:], GRID[-1]], False),
        ((3, 3), PINWHEEL, True),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], False),
    ],
)
def test_shards_are_all_of_a_tensor_and_each_element_once(shape: Any, boxes: list[Any], fits: bool) -> None:
    assert (manifest_checks.find_tiling_error(shape, boxes) is None) is fits

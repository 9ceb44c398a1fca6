"""Headers of safetensors files that somebody else wrote, damaged ones included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertrain.checkpoint.format.safetensors_files import check_tensors, read_weight_files
from clustertrain.errors import ConfigError, NotFound


def write(path: Path, entries: dict[str, Any], data: bytes = bytes(64)) -> Path:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(shape: list[int], first: int = 0, dtype: str = "F32", size: int = 4) -> dict[str, Any]:
    count = size
    for n in shape:
        count *= n
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, first + count]}


def test_tensors_of_one_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, "w": entry([2, 3]), "b": entry([3], 24)}
    )
    for source in (path, tmp_path):
        files = read_weight_files(source)
        assert files.folder == tmp_path
        shard = files.tensors["b"].shards[0]
        assert (shard.file, shard.shape, shard.nbytes) == ("a.safetensors", (3,), 12)
        assert shard.offset == path.stat().st_size - 64 + 24


def test_tensors_of_several_files(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"w": entry([2])})
    write(tmp_path / "2.safetensors", {"b": entry([3])})
    index = {"weight_map": {"w": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weight_files(tmp_path).tensors.keys() == {"w", "b"}
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(NotFound, match=r"2\.safetensors: is missing"):
        read_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "../secret.safetensors"}, "not a file in its folder"),
        ({"w": 1}, "has no weight_map"),
        (None, "has no weight_map"),
    ],
)
def test_index_names_only_files_of_its_folder(tmp_path: Path, weight_map: Any, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=message):
        read_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"w": entry([2, 16])}, "is torn: w ends at byte"),
        ({"w": {**entry([2]), "shape": [3]}}, "has 8 bytes, but its shape has 12"),
        ({"w": {**entry([2]), "shape": [-2]}}, "has no shape"),
        ({"w": {**entry([2]), "shape": [True, 2]}}, "has no shape"),
        ({"w": {**entry([2]), "data_offsets": [0]}}, "has no shape and two data_offsets"),
        ({"w": {**entry([2]), "dtype": "F4"}}, "dtype 'F4' is unknown"),
        ({"w": 3}, "has no shape"),
        ([1], "the header is not an object"),
    ],
)
def test_damaged_header_is_refused(tmp_path: Path, entries: Any, message: str) -> None:
    write(tmp_path / "model.safetensors", entries)
    with pytest.raises(ConfigError, match=message):
        read_weight_files(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\xff" * 64, (1000).to_bytes(8, "little") + b"{}"])
def test_file_of_another_format_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="is not a safetensors file, or ends in its header"):
        read_weight_files(tmp_path)


def test_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{")
    with pytest.raises(ConfigError, match="the header is not JSON"):
        read_weight_files(tmp_path)


def test_folder_without_safetensors_names_the_pickle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(NotFound, match=r"only pytorch_model\.bin, which could run code"):
        read_weight_files(tmp_path)


def test_several_files_need_an_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {"w": entry([2])})
    with pytest.raises(ConfigError, match=r"has 2 safetensors files and no model\.safetensors\.index\.json"):
        read_weight_files(tmp_path)


def test_all_differences_from_the_model_are_listed(tmp_path: Path) -> None:
    entries = {
        "model.norm.weight": entry([4]),
        "model.lays.0.weight": entry([2]),
        "q.bias": entry([2]),
        "ids": entry([2], dtype="I64", size=8),
        "model.layers.0.rotary_emb.inv_freq": entry([2]),
        "lm_head.weight": entry([2]),
    }
    files = read_weight_files(write(tmp_path / "model.safetensors", entries))
    with pytest.raises(ConfigError) as error:
        check_tensors(files, {"model.norm.weight": (5,), "model.layers.0.weight": (2,), "ids": (2,)}, "the decoder")
    assert error.value.message.splitlines() == [
        f"{tmp_path}: the tensors are not those of the decoder:",
        "  model.layers.0.weight is missing; the nearest name is model.lays.0.weight",
        "  model.norm.weight has shape [4], not [5]",
        "  ids has dtype int64, which is not float32, bfloat16, float16, float64",
        "  model.lays.0.weight is not in the model",
        "  q.bias is not in the model",
    ]


def test_layers_that_differ_alike_share_a_line(tmp_path: Path) -> None:
    shapes = {f"layers.{n}.{part}": (2,) for n in (0, 1, 2, 5) for part in ("q", "k")}
    entries = {f"layers.{n}.k": entry([3]) for n in (0, 1, 2)} | {f"layers.{n}.query.9": entry([2]) for n in range(30)}
    files = read_weight_files(write(tmp_path / "model.safetensors", entries))
    with pytest.raises(ConfigError) as error:
        check_tensors(files, shapes, "the decoder")
    assert error.value.message.splitlines()[1:] == [
        "  layers.{0-2,5}.q is missing (4 tensors)",
        "  layers.5.k is missing",
        "  layers.{0-2}.k has shape [3], not [2] (3 tensors)",
        "  layers.{0-29}.query.9 is not in the model (30 tensors)",
    ]

"""Adapters in PEFT's format: differences from what a recipe expects are listed, and the hash of a base is of its
tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clustertrain.checkpoint.format import adapter_files
from clustertrain.checkpoint.format.adapter_files import BASE_HASH, CONFIG_FILE, WEIGHTS_FILE, check_adapter
from clustertrain.checkpoint.format.safetensors_files import read_weight_files
from clustertrain.config.adapter import AdapterSpec
from clustertrain.errors import ConfigError, NotFound

SPEC = AdapterSpec(kind="lora", rank=2, alpha=8.0)
SHAPES = {adapter_files.peft_name("q", "lora_A"): (2, 4), adapter_files.peft_name("q", "lora_B"): (3, 2)}


def write_adapter(folder: Path, metadata: dict[str, str] | None = None, **config: Any) -> Path:
    folder.mkdir()
    document = adapter_files.to_peft_config(SPEC, ["q"], ["q", "v"], "a/base", None)
    (folder / CONFIG_FILE).write_text(json.dumps({**document, **config}))
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, folder / WEIGHTS_FILE, metadata)
    return folder


def test_suitable_adapter_passes(tmp_path: Path) -> None:
    check_adapter(write_adapter(tmp_path / "a"), SPEC, SHAPES, "ab")
    check_adapter(write_adapter(tmp_path / "b", {BASE_HASH: "ab"}, modules_to_save=[]), SPEC, SHAPES, "ab")
    check_adapter(tmp_path / "b", SPEC, SHAPES, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 4}, "r = 4 in adapter_config.json, but 2 here"),
        ({"lora_alpha": 16}, "lora_alpha = 16 in adapter_config.json, but 8.0 here"),
        ({"use_dora": True, "use_rslora": True}, "use_dora = True.*; use_rslora = True"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\].*not supported"),
        ({"rank_pattern": {"q": 4}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    ],
)
def test_another_configuration_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_adapter(write_adapter(tmp_path / "a", **config), SPEC, SHAPES, None)


def test_other_tensors_are_listed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    other = {adapter_files.peft_name("v", "lora_A"): (2, 4), adapter_files.peft_name("q", "lora_A"): (2, 5)}
    with pytest.raises(ConfigError) as raised:
        check_adapter(folder, SPEC, other, None)
    for text in ("v.lora_A.weight is missing", "q.lora_B.weight is in no adapted layer", "shape [2, 4], not [2, 5]"):
        assert text in raised.value.message


def test_adapter_of_a_changed_base_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {BASE_HASH: "12" * 32})
    with pytest.raises(ConfigError, match=r"was trained on a different base.*a/base"):
        check_adapter(folder, SPEC, SHAPES, "ab" * 32)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_damaged_configuration_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / CONFIG_FILE).write_text(content)
    with pytest.raises(ConfigError, match=CONFIG_FILE):
        check_adapter(folder, SPEC, SHAPES, None)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(NotFound, match=name):
        check_adapter(folder, SPEC, SHAPES, None)


def hash_of(folder: Path) -> str:
    files = read_weight_files(folder)
    return adapter_files.combine_hashes(adapter_files.hash_tensors(files, files.tensors))


def test_hash_of_a_base_depends_on_its_tensors_and_not_on_its_files(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
    for name, changed in (
        ("same", tensors),
        ("value", {**tensors, "b": torch.tensor([1.0, 1.0, 1.0001])}),
        ("shape", {**tensors, "a": torch.arange(6.0).reshape(3, 2)}),
        ("dtype", {**tensors, "b": torch.ones(3, dtype=torch.int32)}),
    ):
        (tmp_path / name).mkdir()
        save_file(changed, tmp_path / name / "model.safetensors")
    (tmp_path / "split").mkdir()
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / "split" / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "split" / "model.safetensors.index.json").write_text(json.dumps(index))
    hashes = {name: hash_of(tmp_path / name) for name in ("same", "split", "value", "shape", "dtype")}
    assert hashes["same"] == hashes["split"]
    assert len(set(hashes.values())) == 4

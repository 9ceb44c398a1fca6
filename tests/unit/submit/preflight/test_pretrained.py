"""Checks of pretrained weights at submission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from clustertrain.config.huggingface import families, tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError, NotFound
from clustertrain.submit.preflight import pretrained
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import SubmitRequest
from tests.unit.checkpoint.saved import decoder, make_run, recipe_of

pytestmark = [pytest.mark.usefixtures("fake_slurm"), pytest.mark.long]
SPEC = ModelSpec(dim=32, layers=1, heads=2, kv_heads=1, head_dim=32, ffn_dim=48, qk_norm=True)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_names.list_tensors(SPEC).values()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(families.build_config(SPEC, 256, "float32")))
    return folder


def prepare_run(cwd: Path, **model: Any) -> PreparedRun:
    return prepare(SubmitRequest(cwd=cwd, assignments=tuple(f"model.{key}={value}" for key, value in model.items())))


def test_weights_define_the_model_and_are_noted(tmp_path: Path, weights: Path) -> None:
    prepared = prepare_run(tmp_path, init="weights")
    model = prepared.spec.recipe.model
    assert (model.init, model.head_dim, model.qk_norm) == (str(weights), 32, True)
    assert pretrained.check_pretrained(prepared) == f"weights: 14 tensors from {weights}, float32"
    assert pretrained.check_pretrained(prepare_run(tmp_path)) is None


def test_weights_of_parts_are_noted(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "nets.py").write_text("def make(): ...")
    assignment = 'model.init_parts={tower="weights", decoder="weights/model.safetensors"}'
    prepared = prepare(SubmitRequest(cwd=tmp_path, assignments=("model.entry=nets:make", assignment)))
    note = f"weights: 14 tensors from {weights} for tower; 14 tensors from {weights}/model.safetensors for decoder"
    assert pretrained.check_pretrained(prepared) == f"{note}; the ranks compare them with the model's"


def test_torn_or_missing_weights_are_refused(tmp_path: Path, weights: Path) -> None:
    prepared = prepare_run(tmp_path, init="weights")
    path = weights / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="is torn"):
        pretrained.check_pretrained(prepared)
    path.unlink()
    with pytest.raises(NotFound, match="contains no safetensors file"):
        pretrained.check_pretrained(prepared)


def test_single_file_needs_the_sizes_in_the_recipe(tmp_path: Path, weights: Path) -> None:
    (weights / "config.json").unlink()
    sizes = {name: getattr(SPEC, name) for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim")}
    prepared = prepare_run(tmp_path, init="weights/model.safetensors", qk_norm="true", **sizes)
    assert pretrained.check_pretrained(prepared)
    with pytest.raises(ConfigError, match=r"layers\.1\.input_layernorm\.weight is missing"):
        pretrained.check_pretrained(prepare_run(tmp_path, init="weights/model.safetensors", **{**sizes, "layers": 2}))


def test_checkpoint_of_a_run_defines_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    sizes = {"layers": 1, "qk_norm": True, "dropout": 0.1}
    run = make_run(tmp_path / "runs" / "first-abc123", decoder(recipe_of(**sizes)), (10, 20), **sizes)
    prepared = prepare_run(tmp_path, init="first-abc123")
    model, newest = prepared.spec.recipe.model, run / "checkpoints" / "step-00000020"
    assert (model.init, model.layers, model.qk_norm, model.dropout) == (str(newest), 1, True, 0.0)
    assert pretrained.check_pretrained(prepared) == f"weights: 14 tensors from {newest}, float32"
    with pytest.raises(ConfigError, match="layers = 2 in the recipe, but 1 in the checkpoint"):
        prepare_run(tmp_path, init="first-abc123", layers=2)
    with pytest.raises(NotFound, match=r"model.init = nowhere: .* no such run"):
        prepare_run(tmp_path, init="nowhere")

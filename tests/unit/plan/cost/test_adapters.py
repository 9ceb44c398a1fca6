"""What the plan knows of adapters: memory as traced, refusals before the queue, FLOPs and the description."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clustertrain.config.checks.adapter_checks import check_base
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import PRESETS
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.cost.adapter_shape import AdapterShape, find_adapter
from clustertrain.plan.explain.adapter import describe_adapter
from tests.harness.fake_cluster.adapter_cells import list_cells
from tests.paths import ROOT

TRACED = json.loads((ROOT / "benchmarks" / "results" / "fake_memory_adapters.json").read_text())["rows"]


def recipe_of(preset: str = "llama3.1-8b", **adapter: Any) -> Recipe:
    return build({"model": dict(PRESETS[preset]), "adapter": {"kind": "lora", **adapter}}, Recipe, "recipe")


def shape_of(recipe: Recipe) -> AdapterShape:
    adapter = find_adapter(recipe.adapter, recipe.model)
    assert adapter is not None
    return adapter


def test_predicted_memory_is_that_of_the_traces() -> None:
    cells = {(kind, cell.name): cell for kind, cell in list_cells()}
    errors = {}
    for row in TRACED:
        predicted = cells[row["fine_tune"], row["cell"]].predict()
        del predicted["overhead"]
        errors[row["fine_tune"], row["cell"]] = sum(predicted.values()) / sum(row["traced_gib"].values()) - 1
    assert errors.keys() == cells.keys() and max(map(abs, errors.values())) < 0.05, errors


def test_bytes_and_elements_of_an_8b_model() -> None:
    recipe = recipe_of(base_precision="nf4", target_modules=["*.q", "*.v"])
    adapter, model = shape_of(recipe), recipe.model
    assert adapter.trained_elements(model) == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    weights = 32 * (model.block_parameters() - 2 * 4096)
    assert 32 * adapter.matrix_bytes(model) == weights * 36 / 64
    assert 32 * shape_of(recipe_of()).matrix_bytes(model) == 4 * weights
    assert "in 4 bits (NF4) take 3.66 GiB" in describe_adapter(recipe.adapter, model)


def test_tensor_parallelism_that_cuts_a_block_is_refused() -> None:
    model = {"dim": 4096, "heads": 32, "kv_heads": 32, "ffn_dim": 11_008}
    recipe = build({"model": model, "adapter": {"kind": "lora", "base_precision": "int8"}}, Recipe, "recipe")
    check_base(recipe, 4)
    with pytest.raises(ConfigError, match=r"'int8' with tp 8: .* model.ffn_dim = 11008 \(11008 / 8 = 1376\)") as e:
        check_base(recipe, 8)
    assert e.value.fix == "use --tp 2 or 4, adapter.base_precision = 'bf16', or fsdp instead of tp"
    assert not shape_of(recipe).allows_tp(recipe.model, 8) and shape_of(recipe).allows_tp(recipe.model, 4)

"""Runs with a base in 8 or 4 bits: the same codes under every layout, exact resume, and exports with plain weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from clustertrain.checkpoint.format import low_bit
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.config.huggingface import families, tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.layouts import FSDP_TP
from tests.ranks.rank_pool import digest, make_run
from tests.ranks.test_adapters import LAYOUTS, STEPS_PER_LAYOUT, continue_under_each, stop_soon
from tests.ranks.test_pretrained import write_weights
from tests.ranks.test_tensor_parallel import assert_equal_up_to_rounding, save_initial_values, start

pytestmark = pytest.mark.ranks
SPEC = ModelSpec(dim=128, layers=2, heads=4, kv_heads=2, ffn_dim=256, qkv_bias=True)
FSDP = Layout(strategy="fsdp", dp_shard=2)


def run_of(folder: Path, weights: Path, layout: Layout, precision: str, **kw: Any) -> RunDir:
    model = families.apply_init({"model": {"init": str(weights)}}, folder)["model"]
    tables = {"adapter": {"kind": "lora", "rank": 4, "alpha": 16.0, "base_precision": precision}}
    options = {"steps": 3, "every": 100, "model": model, "tables": tables, **kw}
    return make_run(folder, layout, layout.world_size, **options)


def test_layouts_pack_the_same_codes_and_exports_unpack_them(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights", SPEC)
    one, split = (run_of(tmp_path / name, weights, lay, "nf4") for name, lay in (("one", Layout()), ("split", FSDP_TP)))
    expected = start(one, Layout(), setup=save_initial_values).expect(0)
    actual = start(split, FSDP_TP, setup=save_initial_values).expect(0)
    assert digest(split, 1) == digest(one, 1)
    assert_equal_up_to_rounding(actual.losses(), expected.losses())
    # B is zero at first, so the merged weights are those of the base, in 4 bits.
    request = ExportRequest(inspect.find_checkpoint(split.checkpoints, 1), tmp_path / "merged", merge=True)
    export_checkpoint(request)
    # transformers would round the layers to the dtype of the embedding.
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == "float32"
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    files = {k: v for path in weights.glob("*.safetensors") for k, v in load_file(path).items()}
    for name, (hf_name, shape) in tensor_names.list_tensors(SPEC).items():
        base = files[hf_name].float()
        if name.startswith("layers.") and len(shape) == 2:
            base = low_bit.dequantize(low_bit.quantize(base, "nf4"), shape[1], torch.float32)
        assert torch.equal(merged[hf_name].float(), base), name


def test_each_layout_continues_the_run_of_another(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights", SPEC)
    steps = STEPS_PER_LAYOUT * len(LAYOUTS)
    undisturbed = run_of(tmp_path / "one", weights, Layout(), "nf4", steps=steps)
    expected = start(undisturbed, Layout()).expect(0).losses()
    run = run_of(tmp_path / "run", weights, LAYOUTS[0], "nf4", steps=steps)
    losses, _ = continue_under_each(run, LAYOUTS)
    assert_equal_up_to_rounding(losses, expected)


@pytest.mark.parametrize(("layout", "precision"), [(FSDP, "nf4"), (Layout(strategy="ddp", dp_replicate=2), "int8")])
def test_resumed_run_is_bitwise_equal(tmp_path: Path, layout: Layout, precision: str) -> None:
    """The base is random here, in bf16 outside of the layers, and a later save writes only the adapter."""
    options: dict[str, Any] = {
        "steps": 4, "every": 2, "model": {**msgspec.to_builtins(SPEC), "vocab_size": 20_000},
        "tables": {"adapter": {"kind": "lora", "rank": 2, "target_modules": ["*.q"], "base_precision": precision}},
    }  # fmt: skip
    undisturbed = make_run(tmp_path / "one", layout, layout.world_size, **options)
    whole = start(undisturbed, layout).expect(0)
    run = make_run(tmp_path / "run", layout, layout.world_size, **options)
    start(run, layout, setup=stop_soon).expect(0)
    second = start(run, layout, 2).expect(0).losses()
    assert digest(run) == digest(undisturbed) and second and second.items() <= whole.losses().items()
    first, *later = [saved["written"] / saved["bytes"] for saved in whole.events("checkpoint")]
    assert first == 1.0 and later and max(later) < 0.01

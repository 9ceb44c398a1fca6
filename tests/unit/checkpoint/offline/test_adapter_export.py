"""Exported adapters load in PEFT and compute the same logits; merged ones are the same model without adapters."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from clustertrain.checkpoint.format import adapter_files, model_tensors
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.distributed import adapted_linear
from clustertrain.train.models import adapters
from clustertrain.train.models.decoder import Decoder
from tests.unit.checkpoint.saved import decoder, recipe_of, save

SPECS = {
    "lora": AdapterSpec(kind="lora", rank=4, alpha=12.0),
    "rank-stabilized": AdapterSpec(kind="lora", rank=4, alpha=6.0, rank_stabilized=True, target_modules=("*.q", "*.v")),
    "dora": AdapterSpec(kind="dora", rank=4, alpha=12.0, target_modules=("*.attention", "layers.0.ffn.up")),
}
HASH = "ab" * 32


def adapted(recipe: Recipe, spec: AdapterSpec) -> Decoder:
    """Return a decoder with adapters that change its outputs."""
    model = decoder(recipe)
    adapters.add_adapters(model, spec, seed=1)
    with torch.no_grad():
        for _, layer in adapted_linear.iter_adapted(model):
            layer.lora_B.normal_(0.0, 0.05)
            if spec.kind == "dora":
                layer.lora_magnitude_vector.mul_(torch.empty_like(layer.lora_magnitude_vector).uniform_(0.8, 1.2))
    return model.eval()


def save_adapted(folder: Path, model: Decoder, recipe: Recipe, spec: AdapterSpec) -> Path:
    about = {"adapter": {"spec": msgspec.to_builtins(spec), "base": "/a/base", "base_sha256": HASH}}
    return save(folder, 3, {"model": model}, recipe=recipe, about=about)


def tokens_of(recipe: Recipe) -> torch.Tensor:
    return torch.randint(recipe.model.vocab_size, (2, 50), generator=torch.Generator().manual_seed(1))


@pytest.mark.long  # transformers takes seconds to import
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT 0.21 reads an attribute that transformers 5 deprecates
@pytest.mark.parametrize("name", SPECS)
def test_peft_and_merged_model_compute_the_same_logits(tmp_path: Path, name: str) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    spec = SPECS[name]
    recipe = recipe_of(qkv_bias=True)
    base = decoder(recipe).eval()
    export_checkpoint(ExportRequest(save(tmp_path / "base", 1, {"model": base}, recipe=recipe), tmp_path / "hf"))
    ours = adapted(recipe, spec)
    folder = save_adapted(tmp_path / "run", ours, recipe, spec)
    result = export_checkpoint(ExportRequest(folder, tmp_path / "adapter"))
    assert result.files == (adapter_files.WEIGHTS_FILE, adapter_files.CONFIG_FILE)
    export_checkpoint(ExportRequest(folder, tmp_path / "merged", merge=True))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    in_peft = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = tokens_of(recipe)
    with torch.no_grad():
        logits = ours(tokens)
        assert (logits - base(tokens)).abs().max() > 0.1  # otherwise the comparisons below would prove little
        assert (in_peft(tokens).logits - logits).abs().max() < 1e-5
        assert (merged(tokens).logits - logits).abs().max() < 1e-5


def test_adapter_folder_has_the_format_of_peft(tmp_path: Path) -> None:
    spec, recipe = SPECS["rank-stabilized"], recipe_of()
    folder = save_adapted(tmp_path / "run", adapted(recipe, spec), recipe, spec)
    export_checkpoint(ExportRequest(folder, tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["use_dora"]) == (4, 6.0, True, False)
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", "/a/base")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    layers = range(recipe.model.layers)
    assert tensors.keys() == {
        f"base_model.model.model.layers.{n}.self_attn.{m}_proj.lora_{x}.weight"
        for n in layers
        for m in "qv"
        for x in "AB"
    }
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", adapter_files.BASE_HASH: HASH}


def test_layers_of_one_name_that_differ_are_listed_in_full(tmp_path: Path) -> None:
    spec, recipe = SPECS["dora"], recipe_of()
    folder = save_adapted(tmp_path / "run", adapted(recipe, spec), recipe, spec)
    export_checkpoint(ExportRequest(folder, tmp_path / "out", names="own"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {"layers.0.attention.q", "layers.0.ffn.up"} < set(config["target_modules"])
    assert config["task_type"] is None


def test_torch_file_of_a_merged_model_has_its_own_names(tmp_path: Path) -> None:
    spec, recipe = SPECS["lora"], recipe_of()
    model = adapted(recipe, spec)
    folder = save_adapted(tmp_path / "run", model, recipe, spec)
    export_checkpoint(ExportRequest(folder, tmp_path / "merged.pt", "torch", merge=True))
    loaded = Decoder(recipe.model)
    loaded.load_state_dict(torch.load(tmp_path / "merged.pt", weights_only=True))
    with torch.no_grad():
        tokens = tokens_of(recipe)
        assert (loaded.eval()(tokens) - model(tokens)).abs().max() < 1e-5
    export_checkpoint(ExportRequest(folder, tmp_path / "all.pt", "torch"))
    assert torch.load(tmp_path / "all.pt", weights_only=True).keys() == model.state_dict().keys()


def test_merge_without_adapter_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1, {"model": decoder(recipe_of())}, recipe=recipe_of())
    with pytest.raises(UsageError, match="has no adapter"):
        export_checkpoint(ExportRequest(folder, tmp_path / "out", merge=True))


def test_adapted_model_is_no_start_of_another_run(tmp_path: Path) -> None:
    recipe, spec = recipe_of(), SPECS["lora"]
    folder = save_adapted(tmp_path, adapted(recipe, spec), recipe, spec)
    with pytest.raises(ConfigError, match="contains a model with adapters") as e:
        model_tensors.read_weights(folder)
    assert "--merge" in str(e.value.fix)

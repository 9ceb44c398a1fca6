"""Weights that transformers has saved give the same logits here, and return to their files bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.load.pretrained import load_pretrained
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.config.huggingface import families, tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.session import pretrained
from tests.unit.checkpoint.saved import recipe_of, save

pytestmark = [pytest.mark.ranks, pytest.mark.long]  # transformers takes seconds to import

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_scaling": LLAMA3_ROPE}),
    "linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
}


def build_theirs(name: str) -> nn.Module:
    """Return a random model whose norms and biases differ from their initial values."""
    import transformers

    class_name, keys = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**SIZES, **keys)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, p in model.named_parameters():
        if p.dim() == 1:
            nn.init.normal_(p, 0.0 if key.endswith("bias") or name == "gemma" else 1.0, 0.3)
    return model.eval()


def load(folder: Path) -> Decoder:
    spec = build(families.read_model_table(folder), ModelSpec, "test")
    model = Decoder(spec)
    names = {name: hf_name for name, (hf_name, _) in tensor_names.list_tensors(spec).items()}
    weights = pretrained.name_weights(model, folder, names.__getitem__)
    weights.check()
    load_pretrained(model, folder, weights.names, Ranks(), token="test")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = build_theirs(name)
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    tokens = torch.randint(SIZES["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.1  # otherwise the comparison would prove little
        assert (load(tmp_path)(tokens) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama3", "linear", "mistral", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_export_is_the_inverse_of_loading(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    import transformers
    from safetensors.torch import load_file

    theirs = build_theirs(name).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60kB")  # type: ignore[operator]
    model = load(tmp_path / "theirs")
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # training weights
    recipe = recipe_of(**families.read_model_table(tmp_path / "theirs"))
    folder = save(tmp_path / "checkpoints", 3, {"model": model}, recipe=recipe)
    export_checkpoint(ExportRequest(folder, tmp_path / "ours", dtype=str(dtype).removeprefix("torch.")))

    def tensors(path: Path) -> dict[str, torch.Tensor]:
        return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}

    before, after = tensors(tmp_path / "theirs"), tensors(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values()), loading
    tokens = torch.randint(SIZES["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(again.eval().to(dtype)(tokens).logits, theirs(tokens).logits)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    build_theirs("qwen2").save_pretrained(tmp_path)  # type: ignore[operator]
    spec = build(families.read_model_table(tmp_path), ModelSpec, "test")
    other = Decoder(msgspec.structs.replace(spec, qkv_bias=False))
    with pytest.raises(ConfigError, match=r"q_proj\.bias is not in the model"):
        names = {name: hf_name for name, (hf_name, _) in tensor_names.list_tensors(other.spec).items()}
        pretrained.name_weights(other, tmp_path, names.__getitem__).check()

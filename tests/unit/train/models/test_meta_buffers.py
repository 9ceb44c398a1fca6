"""Models of transformers that are built on the meta device compute what those with all their values compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.errors import ConfigError
from tests.unit.train.models.test_pretrained_families import LLAMA3_ROPE, SIZES

pytestmark = pytest.mark.long  # transformers takes seconds to import

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 32}),
    "gpt2": ("GPT2Config", {}),
}
TOKENS = torch.randint(SIZES["vocab_size"], (2, 60), generator=torch.Generator().manual_seed(1))


def build(name: str) -> nn.Module:
    import transformers

    class_name, keys = CONFIGS[name]
    sizes = SIZES if name != "gpt2" else {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = getattr(transformers, class_name)(**sizes, **keys)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(TOKENS).logits
    return result


class Wrapped(nn.Module):
    """A model of another type around one of transformers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.language = build(name)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_saved_model(session: ct.Session, tmp_path: Path, name: str, wrapped: bool) -> None:
    saved = build(name)
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    with torch.device("meta"):
        model = Wrapped(name) if wrapped else build(name)
    language = model.get_submodule("language") if wrapped else model
    session.load_pretrained(language, tmp_path)
    model = session.parallelize(model)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert torch.equal(logits(model.get_submodule("language") if wrapped else model), logits(saved))


class Scaled(nn.Linear):
    def __init__(self, persistent: bool) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2), persistent=persistent)


def test_buffer_that_nothing_computes_is_refused(session: ct.Session, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {"weight": torch.randn(2, 2), "bias": torch.randn(2), "scale": torch.randn(2)}
    save_file(values, tmp_path / "with.safetensors")
    save_file({k: v for k, v in values.items() if k != "scale"}, tmp_path / "without.safetensors")
    with torch.device("meta"):
        in_file, computed = Scaled(persistent=True), Scaled(persistent=False)
    session.load_pretrained(computed, tmp_path / "without.safetensors")
    with pytest.raises(ConfigError, match="buffer scale is on the meta device, and nothing would fill it"):
        session.parallelize(computed)
    session.load_pretrained(in_file, tmp_path / "with.safetensors")
    assert torch.equal(session.parallelize(in_file).state_dict()["scale"], values["scale"])

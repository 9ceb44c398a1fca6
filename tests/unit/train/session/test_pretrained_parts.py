"""Parts of a model that start from weights of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import clustertrain as ct
from clustertrain.config.huggingface import tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError, NotFound
from clustertrain.plan.layout import Layout
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.session import pretrained
from clustertrain.train.trainer import load_weights

TEXT = ModelSpec(dim=16, layers=1, heads=2, kv_heads=2, vocab_size=8)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.projector, self.decoder = nn.Linear(2, 3), nn.Linear(3, 16), Decoder(TEXT)
        self.filled: list[str] = []

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        self.filled.append(name)
        tensor.fill_(0.5)


def on_meta() -> Whole:
    with torch.device("meta"):
        return Whole()


def write(path: Path, module: nn.Module, rename: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    """Write random weights for ``module``, and return them by the module's names."""
    tensors = {name: torch.randn(t.shape) for name, t in module.state_dict().items()}
    save_file({(rename or {}).get(name, name): t for name, t in tensors.items()}, path)
    return tensors


def entry(**keys: Any) -> ModelSpec:
    return ModelSpec(entry="nets:Whole", **keys)


@pytest.mark.parametrize("huggingface", [False, True])
def test_parts_are_loaded_and_the_rest_is_initialized(session: ct.Session, tmp_path: Path, huggingface: bool) -> None:
    model, tower, decoder = on_meta(), tmp_path / "tower.safetensors", tmp_path / "decoder.safetensors"
    hf_names = {own: hf for own, (hf, _) in tensor_names.list_tensors(TEXT).items()}
    expected = write(tower, model.tower), write(decoder, model.decoder, hf_names if huggingface else None)
    load_weights(session, entry(init_parts={"tower": str(tower), "decoder": str(decoder)}), model)
    state = session.parallelize(model).state_dict()
    for part, tensors in zip(("tower", "decoder"), expected, strict=True):
        assert all(torch.equal(state[f"{part}.{name}"], t) for name, t in tensors.items())
    assert model.filled == ["projector.weight", "projector.bias"] and state["projector.bias"].eq(0.5).all()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_in_the_file_once(session: ct.Session, tmp_path: Path) -> None:
    expected = torch.randn(8, 4)
    save_file({"embed.weight": expected}, tmp_path / "tied.safetensors")
    model = session.parallelize(session.load_pretrained(Tied(), tmp_path / "tied.safetensors"))
    assert model.head.weight is model.embed.weight and torch.equal(model.embed.weight, expected)


def test_init_loads_the_whole_model_of_an_entry(session: ct.Session, tmp_path: Path) -> None:
    model, path = on_meta(), tmp_path / "all.safetensors"
    expected = write(path, model)
    load_weights(session, entry(init=str(path)), model)
    state = session.parallelize(model).state_dict()
    assert all(torch.equal(state[name], t) for name, t in expected.items()) and not model.filled


def test_model_on_the_cpu_keeps_its_other_values(session: ct.Session, tmp_path: Path) -> None:
    model = Whole()
    before = model.projector.weight.detach().clone()
    expected = write(tmp_path / "tower.safetensors", model.tower)
    session.load_pretrained(model.tower, tmp_path / "tower.safetensors")
    session.parallelize(model)
    assert torch.equal(model.tower.weight, expected["weight"]) and torch.equal(model.projector.weight, before)


def test_wrong_parts_raise(session: ct.Session, tmp_path: Path) -> None:
    model, path = on_meta(), tmp_path / "tower.safetensors"
    write(path, model.tower)
    with pytest.raises(ConfigError, match="nets:Whole has no module 'towr'") as e:
        load_weights(session, entry(init_parts={"towr": str(path)}), model)
    assert "tower" in str(e.value.fix)
    with pytest.raises(ConfigError, match=r"not those of Linear:\n  weight has shape \[3, 2\], not \[16, 3\]"):
        load_weights(session, entry(init_parts={"projector": str(path)}), model)
    with pytest.raises(NotFound):
        load_weights(session, entry(init_parts={"decoder": str(tmp_path / "none")}), model)
    with pytest.raises(ConfigError, match="tensors are not those of Whole"):
        load_weights(session, entry(init=str(path)), model)


def test_selection_of_weights(tmp_path: Path) -> None:
    model, other = on_meta(), on_meta()
    weights = [pretrained.name_weights(m, tmp_path, None) for m in (model.tower, other.tower)]
    (selected,) = pretrained.select(weights, model, Layout())
    assert selected.parameter_names() == ["tower.weight", "tower.bias"]
    with pytest.raises(ConfigError, match="pp 2: weights of parts"):
        pretrained.select(weights, model, Layout(pp=2, schedule="1f1b"))
    weights.append(pretrained.name_weights(model, tmp_path, None))
    with pytest.raises(ConfigError, match=r"tower\.bias would be loaded twice"):
        pretrained.select(weights, model, Layout())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"init_parts": {"a": "b"}}, "set entry, or init"),
        ({"entry": "a:b", "init_parts": {"a": "b"}, "init": "c"}, "mutually exclusive"),
        ({"entry": "a:b", "init_parts": {"": "b"}}, "needs names of modules"),
        ({"entry": "a:b", "init_parts": {"a": ""}}, "needs names of modules"),
    ],
)
def test_contradictory_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(**keys)


@pytest.mark.parametrize("adapters_first", [False, True])
def test_part_in_fewer_bits_is_loaded(session: ct.Session, tmp_path: Path, adapters_first: bool) -> None:
    model, path = Whole(), tmp_path / "projector.safetensors"
    expected = write(path, model.projector)
    if not adapters_first:
        session.load_pretrained(model.projector, path)
    session.add_adapters(model, ["decoder.layers.*.attention"], rank=2, base_precision="nf4")
    if adapters_first:
        session.load_pretrained(model.projector, path)
    session.parallelize(model)
    assert torch.equal(model.projector.weight, expected["weight"].bfloat16())

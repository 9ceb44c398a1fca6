"""Adapters in any module: which layers get one, what they change, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError
from clustertrain.train.distributed import adapted_linear
from clustertrain.train.models import adapters
from clustertrain.train.models.decoder import Decoder
from tests.unit.train.single_process import build_on_cpu

SIZES = ModelSpec(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24, vocab_size=32)
TOKENS = torch.arange(20).reshape(2, 10)


def spec_of(*patterns: str, **kw: Any) -> AdapterSpec:
    return AdapterSpec(**{"kind": "lora", "rank": 2, "target_modules": patterns or ("*.attention", "*.ffn"), **kw})


def on_meta(spec: AdapterSpec | None = None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(SIZES)
    if spec is not None:
        adapters.add_adapters(model, spec, seed=3)
    return model


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapted_model_starts_as_the_base_and_trains_only_adapters(kind: Any) -> None:
    base = build_on_cpu(on_meta())
    model = build_on_cpu(on_meta(spec_of(kind=kind)))
    adapted_linear.fill_magnitudes(model)
    assert (model(TOKENS) - base(TOKENS)).abs().max() < (1e-12 if kind == "lora" else 1e-6)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == adapted_linear.adapter_parameter_names(model)
    assert trained == model.state_dict().keys() - base.state_dict().keys()
    model(TOKENS).square().sum().backward()
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "int8", "nf4"])
def test_tied_embedding_of_a_base_in_fewer_bits_trains_in_fp32(precision: Any) -> None:
    with torch.device("meta"):
        model = Decoder(
            ModelSpec(dim=64, layers=1, heads=2, kv_heads=1, ffn_dim=64, vocab_size=32, tie_embeddings=True)
        )
    adapters.add_adapters(model, spec_of(base_precision=precision), seed=3)
    trained = build_on_cpu(model)
    trained(TOKENS).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.parameters() if p.requires_grad)


def test_rows_of_zeros_stay_finite_with_dora() -> None:
    layer = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(layer.weight)
    model = nn.Sequential(layer)
    adapters.add_adapters(model, spec_of("0", kind="dora"), seed=1)
    assert torch.equal(model(torch.ones(2, 4)), torch.zeros(2, 3))


def test_values_do_not_depend_on_when_and_where_the_adapters_are_drawn() -> None:
    from_meta = build_on_cpu(on_meta(spec_of()))
    model = build_on_cpu(on_meta())
    adapters.add_adapters(model, spec_of(), seed=3)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in from_meta.state_dict().items())
    a = state["layers.0.attention.q.lora_A"]
    assert 0.2 < a.abs().max() <= 16**-0.5 and not torch.equal(a, state["layers.1.attention.q.lora_A"])


def test_copy_of_an_adapted_model_has_its_own_adapters() -> None:
    model = build_on_cpu(on_meta(spec_of()))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for _, layer in adapted_linear.iter_adapted(other):
            layer.lora_B.fill_(1.0)
    assert (model(TOKENS) - other(TOKENS)).abs().max() > 0.01


def test_dropout_applies_in_training_only() -> None:
    model = build_on_cpu(on_meta(spec_of(dropout=0.5)))
    with torch.no_grad():
        for _, layer in adapted_linear.iter_adapted(model):
            layer.lora_B.fill_(1.0)
    evaluated = [model.eval()(TOKENS) for _ in range(2)]
    trained = [model.train()(TOKENS) for _ in range(2)]
    assert torch.equal(*evaluated) and not torch.equal(*trained)


class Fused(nn.Module):
    """A model with layers that have no own Linear, as some models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(2, 4, 4))
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(4, 6)


@pytest.mark.parametrize(
    ("spec", "message", "fix"),
    [
        (spec_of("*.wq"), "no Linear layer matches '*.wq'", "its Linear layers are last"),
        (spec_of("embed"), "no Linear layer matches 'embed'", "last"),
        (spec_of("attention"), "matches attention, a MultiheadAttention, which holds in_proj_weight", "split this one"),
        (spec_of("attention.out_proj"), "is inside an attention that does not call it", "choose other layers"),
        (spec_of("experts"), "matches experts, a Module, which holds up", "split this one"),
        (spec_of("last", rank=5), "adapter.rank = 5 exceeds the smaller side of last, a matrix of 6 x 4", "4 or less"),
    ],
)
def test_unsuitable_layers_are_refused(spec: AdapterSpec, message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        adapters.add_adapters(Fused(), spec, seed=1)
    assert message in raised.value.message and fix in (raised.value.fix or "")


def test_pattern_of_several_kinds_of_modules_takes_the_linear_ones() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.LayerNorm(4), "c": nn.Embedding(4, 4)})
    assert adapters.add_adapters(model, spec_of("*"), seed=1) == ["a"]


def test_second_adapters_and_models_without_linear_layers_are_refused() -> None:
    model = on_meta(spec_of())
    with pytest.raises(ConfigError, match="has adapters already"):
        adapters.add_adapters(model, spec_of(), seed=1)
    with pytest.raises(ConfigError) as raised:
        adapters.add_adapters(nn.Sequential(nn.Conv2d(1, 1, 1)), spec_of(), seed=1)
    assert "has no Linear layer" in (raised.value.fix or "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "adapter.rank = 0|rank = 0: must be greater than 0"),
        ({"rank": 2.5}, "rank: expected `int`"),
        ({"alpha": float("nan")}, "alpha = nan"),
        ({"dropout": 1.0}, "dropout = 1.0: must lie between 0 and 0.9"),
        ({"kind": "qlora"}, "kind: invalid enum value 'qlora'"),
        ({"target_modules": []}, "must name at least one module"),
        ({"rank": 10**9}, "at most 65536"),
    ],
)
def test_invalid_values_of_a_script_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapters.build_spec(**{"target_modules": ["*"], "kind": "lora", **values})

"""Frozen linear layers in bf16, 8 and 4 bits: products, gradients, what is converted, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.low_bit import BasePrecision
from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError
from clustertrain.train.distributed import low_bit, tensor_parallel
from clustertrain.train.distributed.low_bit import FrozenEmbedding, FrozenLinear
from clustertrain.train.models.adapters import add_adapters
from clustertrain.train.models.decoder import Decoder
from tests.unit.train.single_process import ALONE

SPEC = ModelSpec(vocab_size=50, dim=128, layers=2, heads=4, kv_heads=2, ffn_dim=256)
LOW: tuple[BasePrecision, ...] = ("bf16", "int8", "nf4")


def frozen(precision: BasePrecision, *, bias: bool = True) -> FrozenLinear:
    torch.manual_seed(1)
    return FrozenLinear(nn.Linear(200, 96, bias=bias).requires_grad_(False), precision)


@pytest.mark.parametrize("precision", LOW)
def test_product_and_gradient_are_those_of_the_matrix(precision: BasePrecision) -> None:
    layer = frozen(precision)
    x = torch.randn(3, 5, 200, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = layer(x), F.linear(y, layer.dense_weight(), layer.bias)
    assert torch.allclose(out, expected, atol=1e-5)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    assert x.grad is not None and y.grad is not None and layer.weight.grad is None
    assert torch.allclose(x.grad, y.grad, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16


@pytest.mark.parametrize("precision", LOW)
def test_backward_pass_keeps_only_what_is_stored(precision: BasePrecision) -> None:
    layer, kept = frozen(precision, bias=False), []
    x = torch.randn(4, 200, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert [t.data_ptr() for t in kept] == [layer.weight.data_ptr()]


def test_layers_get_the_precision_and_the_ends_bf16() -> None:
    model = Decoder(SPEC)
    add_adapters(model, AdapterSpec(kind="lora", rank=4, target_modules=("*.q",), base_precision="nf4"), seed=1)
    assert isinstance(model.embed, FrozenEmbedding) and model.embed.weight.dtype is torch.bfloat16
    assert isinstance(model.head, FrozenLinear) and model.head.weight.dtype is torch.bfloat16
    precisions = {m.precision for m in model.layers.modules() if isinstance(m, FrozenLinear)}
    assert precisions == {"nf4"} and len(low_bit.packed_shapes(model)) == 7 * SPEC.layers
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"layers.{i}.attention.q.lora_{m}" for i in range(2) for m in "AB"}
    assert model.norm is not None and model.norm.weight.dtype is torch.float32
    low_bit.configure(model, ALONE)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


def test_new_adapter_in_low_bits_starts_as_its_base() -> None:
    torch.manual_seed(1)
    model, tokens = Decoder(SPEC), torch.arange(8)[None]
    low_bit.convert_base(model.requires_grad_(False), "nf4")
    low_bit.configure(model, ALONE)
    base = model(tokens)
    torch.manual_seed(1)
    for kind in ("lora", "dora"):
        torch.manual_seed(1)
        adapted = Decoder(SPEC)
        add_adapters(adapted, AdapterSpec(kind=kind, rank=4, base_precision="nf4"), seed=1)  # type: ignore[arg-type]
        low_bit.configure(adapted, ALONE)
        assert torch.allclose(adapted(tokens), base, atol=1e-5)


def test_model_without_frozen_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"have no frozen nn\.Linear"):
        low_bit.convert_base(Decoder(SPEC), "int8")


def test_split_that_cuts_a_block_is_refused() -> None:
    with torch.device("meta"):
        model = Decoder(SPEC)
    low_bit.convert_base(model.requires_grad_(False), "nf4")
    tensor_parallel.check_plan(model, 2)
    with torch.device("meta"):
        narrow = Decoder(ModelSpec(vocab_size=50, dim=128, layers=1, heads=4, kv_heads=2, ffn_dim=192))
    low_bit.convert_base(narrow.requires_grad_(False), "nf4")
    with pytest.raises(ConfigError, match=r"ffn.down: adapter.base_precision = 'nf4' with tp 2 would split a block"):
        tensor_parallel.check_plan(narrow, 2)

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError, UsageError
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import dropout
from clustertrain.train.distributed.dropout import Dropout
from clustertrain.train.models.decoder import Decoder

ALONE = RankContext(0, 0, 1, 1, False, torch.device("cpu"), Layout(), "fp32", None, None, None, None, None)
SAMPLES = torch.arange(40, 48)
SHAPE = (8, 64, 96)  # batch, length, features
SIGMAS = 5.0  # a fair coin of this many elements is within them all but once in a million


def placed(layout: Layout | None = None, rank: int = 0, p: float = 0.3, seed: int = 7) -> nn.ModuleDict:
    """Layers ``a`` and ``b`` as rank ``rank`` of ``layout`` has them."""
    layers = nn.ModuleDict({"a": Dropout(p), "b": Dropout(p)})
    dropout.configure(layers, replace(ALONE, layout=layout or Layout(), rank=rank), seed)
    return layers


def mask(layer: nn.Module, shape: tuple[int, ...] = SHAPE, samples: torch.Tensor = SAMPLES) -> torch.Tensor:
    return layer(torch.ones(shape), samples) != 0  # type: ignore[no-any-return]


def agreement(a: torch.Tensor, b: torch.Tensor, p: float) -> float:
    """How far the share of equal elements is from that of independent masks, in standard deviations."""
    expected = p**2 + (1 - p) ** 2
    return float(abs((a == b).double().mean() - expected) / math.sqrt(expected * (1 - expected) / a.numel()))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_drops_at_the_rate_asked_for_and_keeps_the_mean(p: float) -> None:
    out = placed(p=p)["a"](torch.ones(SHAPE), SAMPLES)
    kept = out != 0
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # of all, by sample, by position, by feature
        rates = kept.double().mean(dims)
        deviation = math.sqrt(p * (1 - p) / (kept.numel() / rates.numel()))
        assert float((rates - (1 - p)).abs().max()) < SIGMAS * deviation
    assert torch.allclose(out[kept], torch.tensor(1 / (1 - p)))


def test_layers_samples_positions_features_and_seeds_are_independent() -> None:
    a, b = placed().values()
    kept = mask(a)
    others = {
        "layer": mask(b),
        "seed": mask(placed(seed=8)["a"]),
        "next sample": mask(a, samples=SAMPLES + 1),
        "far sample": mask(a, samples=SAMPLES + 2**40),
        "neighbours in the batch": kept.roll(1, 0),
        "neighbours in the sequence": kept.roll(1, 1),
        "neighbours in the features": kept.roll(1, 2),
        "diagonal": kept.roll((1, 1), (1, 2)),
    }
    for name, other in others.items():
        assert agreement(kept, other, 0.3) < SIGMAS, name


def test_a_sample_has_the_same_mask_wherever_it_is_and_whenever_it_is_computed() -> None:
    layer = placed()["a"]
    whole = mask(layer)
    assert torch.equal(mask(layer), whole)
    shuffled = torch.tensor([3, 0, 7])
    assert torch.equal(mask(layer, (3, *SHAPE[1:]), SAMPLES[shuffled]), whole[shuffled])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=4),
        Layout(tp=4, sequence_parallel=True),
        Layout(cp=2, tp=2, sequence_parallel=True),
        Layout(strategy="fsdp", dp_shard=2, cp=2, tp=2, sequence_parallel=True),
    ],
    ids=Layout.describe,
)
def test_the_parts_of_a_sequence_have_the_parts_of_its_mask(layout: Layout) -> None:
    parts = layout.cp * layout.tp
    length = SHAPE[1] // parts
    sliced = [mask(placed(layout, rank)["a"], (8, length, SHAPE[2])) for rank in range(parts)]
    assert torch.equal(torch.cat(sliced, dim=1), mask(placed()["a"]))


def test_without_sequence_parallel_the_ranks_of_tensor_parallel_drop_the_same() -> None:
    assert torch.equal(mask(placed(Layout(tp=2), 0)["a"]), mask(placed(Layout(tp=2), 1)["a"]))


def test_evaluation_and_p_0_leave_everything() -> None:
    x = torch.randn(SHAPE)
    assert placed(p=0.0)["a"](x, SAMPLES) is x
    assert placed().eval()["a"](x, SAMPLES) is x


def test_without_places_it_is_torchs_dropout_where_the_ranks_may_differ() -> None:
    x = torch.ones(SHAPE)
    for layer in (placed()["a"], Dropout(0.3)):
        torch.manual_seed(5)
        out = layer(x)
        torch.manual_seed(5)
        assert torch.equal(out, nn.Dropout(0.3)(x))
    with pytest.raises(UsageError, match="samples"):
        placed(Layout(tp=2))["a"](x)


def test_gradients_pass_where_values_did() -> None:
    x = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    out = placed()["a"](x, SAMPLES)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad is not None
    assert torch.equal(x.grad != 0, mask(placed()["a"]))


@pytest.mark.long
def test_compiles_once_for_all_layers() -> None:
    layers = nn.ModuleDict({str(i): Dropout(0.3) for i in range(12)})
    dropout.configure(layers, ALONE, 7)
    x = torch.ones(SHAPE)
    eager = [layer(x, SAMPLES) for layer in layers.values()]
    torch._dynamo.reset()
    for layer, wanted in zip(layers.values(), eager, strict=True):
        layer.compile(fullgraph=True, backend="eager")
        # More layers than dynamo compiles one function for.
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(layer(x, SAMPLES), wanted)


def test_the_decoder_drops_by_the_places_of_its_samples() -> None:
    model = Decoder(ModelSpec(dim=32, layers=2, dropout=0.2))
    dropout.configure(model, ALONE, 7)
    tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([5, 6, 7, 8])
    whole = model(tokens, samples=places)
    assert torch.allclose(model(tokens[2:], samples=places[2:]), whole[2:], atol=1e-6)
    assert not torch.allclose(model(tokens, samples=places + 1), whole, atol=1e-3)
    assert torch.equal(model.eval()(tokens, samples=places), model(tokens))


class _Attention(nn.Module):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    "module", [nn.MultiheadAttention(8, 2, dropout=0.1), _Attention(attn_dropout=0.1), _Attention(dropout_p=0.1)]
)
def test_dropout_of_attention_weights_is_refused_where_attention_is_split(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"0 drops attention weights, and tp 2") as caught:
        dropout.check_no_attention_dropout(nn.Sequential(module), "tp 2")
    assert "residual" in str(caught.value)
    dropout.check_no_attention_dropout(nn.Sequential(nn.MultiheadAttention(8, 2), _Attention(dropout_p=0.0)), "tp 2")

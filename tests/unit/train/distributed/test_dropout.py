"""Dropout masks, which are independent of the layout."""

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

SINGLE_RANK = RankContext(0, 0, 1, 1, False, torch.device("cpu"), Layout(), "fp32", None, None, None, None, None)
SAMPLES = torch.arange(40, 48)
SHAPE = (8, 64, 96)  # batch, length, features
SIGMAS = 5.0  # a deviation this large has a probability below one in a million


def make_layers(layout: Layout | None = None, rank: int = 0, p: float = 0.3, seed: int = 7) -> nn.ModuleDict:
    """Return layers ``a`` and ``b`` as configured on rank ``rank`` of ``layout``."""
    layers = nn.ModuleDict({"a": Dropout(p), "b": Dropout(p)})
    dropout.configure(layers, replace(SINGLE_RANK, layout=layout or Layout(), rank=rank), seed)
    return layers


def mask(layer: nn.Module, shape: tuple[int, ...] = SHAPE, samples: torch.Tensor = SAMPLES) -> torch.Tensor:
    return layer(torch.ones(shape), samples) != 0  # type: ignore[no-any-return]


def agreement_sigmas(a: torch.Tensor, b: torch.Tensor, p: float) -> float:
    """Return how far the fraction of equal elements is from that of independent masks, in standard deviations."""
    expected = p**2 + (1 - p) ** 2
    return float(abs((a == b).double().mean() - expected) / math.sqrt(expected * (1 - expected) / a.numel()))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_drop_rate_and_mean(p: float) -> None:
    out = make_layers(p=p)["a"](torch.ones(SHAPE), SAMPLES)
    kept_mask = out != 0
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # overall, by sample, by position, by feature
        rates = kept_mask.double().mean(dims)
        deviation = math.sqrt(p * (1 - p) / (kept_mask.numel() / rates.numel()))
        assert float((rates - (1 - p)).abs().max()) < SIGMAS * deviation
    assert torch.allclose(out[kept_mask], torch.tensor(1 / (1 - p)))


def test_masks_of_different_keys_are_independent() -> None:
    a, b = make_layers().values()
    kept_mask = mask(a)
    others = {
        "layer": mask(b),
        "seed": mask(make_layers(seed=8)["a"]),
        "next sample": mask(a, samples=SAMPLES + 1),
        "far sample": mask(a, samples=SAMPLES + 2**40),
        "neighbors in the batch": kept_mask.roll(1, 0),
        "neighbors in the sequence": kept_mask.roll(1, 1),
        "neighbors in the features": kept_mask.roll(1, 2),
        "diagonal": kept_mask.roll((1, 1), (1, 2)),
    }
    for name, other in others.items():
        assert agreement_sigmas(kept_mask, other, 0.3) < SIGMAS, name


def test_mask_depends_only_on_the_sample() -> None:
    layer = make_layers()["a"]
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
def test_sequence_chunks_have_matching_mask_chunks(layout: Layout) -> None:
    parts = layout.cp * layout.tp
    length = SHAPE[1] // parts
    sliced = [mask(make_layers(layout, rank)["a"], (8, length, SHAPE[2])) for rank in range(parts)]
    assert torch.equal(torch.cat(sliced, dim=1), mask(make_layers()["a"]))


def test_tp_ranks_drop_alike_without_sequence_parallel() -> None:
    assert torch.equal(mask(make_layers(Layout(tp=2), 0)["a"]), mask(make_layers(Layout(tp=2), 1)["a"]))


def test_eval_mode_and_p_0_change_nothing() -> None:
    x = torch.randn(SHAPE)
    assert make_layers(p=0.0)["a"](x, SAMPLES) is x
    assert make_layers().eval()["a"](x, SAMPLES) is x


def test_without_samples_torch_dropout_is_used() -> None:
    x = torch.ones(SHAPE)
    for layer in (make_layers()["a"], Dropout(0.3)):
        torch.manual_seed(5)
        out = layer(x)
        torch.manual_seed(5)
        assert torch.equal(out, nn.Dropout(0.3)(x))
    with pytest.raises(UsageError, match="samples"):
        make_layers(Layout(tp=2))["a"](x)


def test_gradients_use_the_same_mask() -> None:
    x = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    out = make_layers()["a"](x, SAMPLES)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad is not None
    assert torch.equal(x.grad != 0, mask(make_layers()["a"]))


@pytest.mark.long
def test_compiles_once_for_all_layers() -> None:
    layers = nn.ModuleDict({str(i): Dropout(0.3) for i in range(12)})
    dropout.configure(layers, SINGLE_RANK, 7)
    x = torch.ones(SHAPE)
    eager = [layer(x, SAMPLES) for layer in layers.values()]
    torch._dynamo.reset()
    for layer, expected_output in zip(layers.values(), eager, strict=True):
        layer.compile(fullgraph=True, backend="eager")
        # There are more layers than dynamo's recompilation limit.
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(layer(x, SAMPLES), expected_output)


def test_decoder_dropout_depends_on_sample_positions() -> None:
    model = Decoder(ModelSpec(dim=32, layers=2, dropout=0.2))
    dropout.configure(model, SINGLE_RANK, 7)
    tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    sample_positions = torch.tensor([5, 6, 7, 8])
    whole = model(tokens, samples=sample_positions)
    assert torch.allclose(model(tokens[2:], samples=sample_positions[2:]), whole[2:], atol=1e-6)
    assert not torch.allclose(model(tokens, samples=sample_positions + 1), whole, atol=1e-3)
    assert torch.equal(model.eval()(tokens, samples=sample_positions), model(tokens))


class _Attention(nn.Module):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    "module",
    [nn.MultiheadAttention(8, 2, dropout=0.1), _Attention(attn_dropout=0.1), _Attention(dropout_p=0.1)],
    ids=["MultiheadAttention", "attn_dropout", "dropout_p"],
)
def test_attention_dropout_raises_if_attention_is_split(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"0 applies dropout to attention weights, and tp 2") as caught:
        dropout.check_no_attention_dropout(nn.Sequential(module), "tp 2")
    assert "residual" in str(caught.value)
    dropout.check_no_attention_dropout(nn.Sequential(nn.MultiheadAttention(8, 2), _Attention(dropout_p=0.0)), "tp 2")

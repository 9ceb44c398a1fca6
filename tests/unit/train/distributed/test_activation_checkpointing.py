"""Recomputation of every Nth layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from clustertrain.config.model import ModelSpec
from clustertrain.plan.layout import Layout, format_checkpointing, recompute_interval, recomputed_share
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.parallelize import parallelize
from clustertrain.train.models import decoder
from clustertrain.train.models.decoder import Decoder
from tests.unit.train.single_process import ALONE


def run_backward(mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of one backward pass, and how often a layer's attention was computed."""
    calls, original = 0, decoder.Attention.forward

    def counted(self: decoder.Attention, *args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(self, *args)

    monkeypatch.setattr(decoder.Attention, "forward", counted)
    with torch.device("meta"):
        model = Decoder(ModelSpec(dim=32, layers=5, heads=4, kv_heads=2))
    context = dataclasses.replace(ALONE, layout=Layout(activation_checkpointing=mode))
    model = parallelize(model, context, ProcessGroups(None, None, None, None), 3)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    model(tokens).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], calls


@pytest.mark.parametrize(
    ("mode", "recomputed"), [("none", 0), ("full/2", 3), ("full/3", 2), ("full/9", 1), ("full", 5)]
)
def test_every_nth_layer_is_recomputed_with_equal_gradients(
    mode: str, recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        expected, _ = run_backward("none", patch)
    gradients, calls = run_backward(mode, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    assert calls == 5 + recomputed and recomputed_share(mode, 5) == recomputed / 5


def test_names_of_modes() -> None:
    assert [format_checkpointing(mode) for mode in ("selective", 3)] == ["selective", "full/3"]
    assert [recompute_interval(mode) for mode in ("none", "selective", "full", "full/3", "full/0")] == [0, 0, 1, 3, 0]

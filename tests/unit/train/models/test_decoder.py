"""The decoder: initialization, attention, rotary embeddings and parameter groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clustertrain.config.data import DataSpec
from clustertrain.config.model import ModelSpec
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.data.text import ByteText
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.parallelize import parallelize
from clustertrain.train.models.decoder import Decoder, RotaryTable, rotate
from clustertrain.train.optim.param_groups import groups_for_unsharded

CPU = torch.device("cpu")
SINGLE_RANK = RankContext(0, 0, 1, 1, False, CPU, Layout(), "fp32", None, None, None, None, None)


def build_decoder(**kw: object) -> Decoder:
    with torch.device("meta"):
        model = Decoder(ModelSpec(**kw))  # type: ignore[arg-type]
    model = parallelize(model, SINGLE_RANK, ProcessGroups(None, None, None, None), seed=3)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_initial_loss_equals_uniform_guessing(tied: bool) -> None:
    text = ByteText(DataSpec(seq_len=64, max_bytes=100_000))
    tokens, targets = (torch.stack(part) for part in zip(*(text[i] for i in range(16)), strict=True))
    logits = build_decoder(tie_embeddings=tied)(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_matches_the_plan(tied: bool) -> None:
    model = build_decoder(tie_embeddings=tied)
    assert sum(p.numel() for p in model.parameters()) == model.spec.parameters()


def test_each_layer_uses_scaled_dot_product_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    original = F.scaled_dot_product_attention

    def counting(*args: Any, **kw: Any) -> torch.Tensor:
        calls.append(kw["is_causal"])
        return original(*args, **kw)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    build_decoder(layers=3)(torch.zeros(1, 8, dtype=torch.int64))
    assert calls == [True] * 3


def test_attention_is_causal() -> None:
    model = build_decoder()
    a = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[0, 12:] = 0
    assert torch.equal(model(a)[0, :12], model(b)[0, :12])


def test_rotation_keeps_norms_and_depends_on_distance() -> None:
    cos, sin = RotaryTable(16, 10_000.0).get(32, CPU)
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 32, 16)
    rq, rk = rotate(q, cos, sin), rotate(k, cos, sin)
    assert torch.allclose(rq.norm(dim=-1), q.norm(dim=-1), atol=1e-5)
    scores = (rq @ rk.transpose(-1, -2))[0, 0]
    assert torch.allclose(scores[5, 2], scores[20, 17], atol=1e-4)
    assert not torch.allclose(scores[5, 2], scores[20, 16], atol=1e-4)


def test_initial_values_depend_only_on_seed_and_name() -> None:
    assert torch.equal(build_decoder().layers["1"].ffn.up.weight, build_decoder().layers["1"].ffn.up.weight)
    model = build_decoder()
    assert not torch.equal(model.layers["0"].ffn.up.weight, model.layers["1"].ffn.up.weight)
    # A deeper model has the same first layer: one parameter's draw does not shift another's.
    assert torch.equal(build_decoder(layers=6).layers["0"].attention.q.weight, model.layers["0"].attention.q.weight)


def test_norms_biases_and_embeddings_have_no_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    with_decay, without = groups_for_unsharded(model, 0.1)
    assert [tuple(p.shape) for p in with_decay["params"]] == [(4, 4)]  # type: ignore[attr-defined]
    assert len(without["params"]) == 4  # type: ignore[arg-type]
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.1, 0.0)
    groups = groups_for_unsharded(build_decoder(), 0.1)
    assert sum(len(g["params"]) for g in groups) == len(list(build_decoder().parameters()))  # type: ignore[arg-type]


def test_byte_text_samples_are_consecutive(tmp_path: object) -> None:
    text = ByteText(DataSpec(seq_len=10, max_bytes=1_000))
    assert len(text) == 99
    inputs, targets = text[3]
    assert torch.equal(targets, torch.cat((inputs[1:], text[4][0][:1])))

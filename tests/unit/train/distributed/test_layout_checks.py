"""Errors of tensor and context parallelism before ranks start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.config.job import RunSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, UsageError
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import context_parallel, tensor_parallel
from clustertrain.train.models.decoder import Decoder

CPU = torch.device("cpu")


def context(layout: Layout, **parallel: Any) -> RankContext:
    spec = RunSpec(recipe=Recipe(parallel=ParallelSpec(**parallel)))
    return RankContext(0, 0, layout.world_size, 1, True, CPU, layout, "fp32", None, None, None, spec, None)


def decoder(**spec: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelSpec(**{"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, **spec}))


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)


PLAN = {"up": "colwise", "down": "rowwise", "norm": "sequence"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_decoder_plan_covers_all_parameters(tied: bool, tp: int) -> None:
    tensor_parallel.check(decoder(tie_embeddings=tied), context(Layout(tp=tp)))


@pytest.mark.parametrize(
    ("spec", "tp", "message", "fix"),
    [
        ({}, 4, "model.kv_heads = 2 does not divide over tp = 4: 2 / 4 = 0.5", "use 4, or a tp that divides 2"),
        ({"heads": 2}, 4, "model.heads = 2 does not divide over tp = 4", "use 4,"),
        ({"vocab_size": 257}, 2, "model.vocab_size = 257 does not divide over tp = 2: 257 / 2 = 128.5", "256 or 258"),
        ({"ffn_dim": 33}, 2, "model.ffn_dim = 33 does not divide over tp = 2: 33 / 2 = 16.5", "32 or 34"),
    ],
    ids=["kv_heads", "heads", "vocab_size", "ffn_dim"],
)
def test_indivisible_size_shows_the_arithmetic(spec: dict[str, int], tp: int, message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tensor_parallel.check(decoder(**spec), context(Layout(tp=tp)))
    assert message in caught.value.message
    assert caught.value.fix is not None and fix in caught.value.fix


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "TwoLinears has no tp_plan"),
        ({**PLAN, "layers.*.up": "colwise"}, "'layers.*.up' matches no module of TwoLinears"),
        ({**PLAN, "up": "columns"}, "'up': 'columns' is not one of colwise, rowwise,"),
        ({**PLAN, "norm": "rowwise"}, "norm is a LayerNorm; 'rowwise' is for Linear"),
        ({"up": "colwise", "down": "rowwise"}, "no pattern covers parameter norm.weight"),
        ({**PLAN, "up": "gather"}, "no pattern covers parameter up.weight"),
        ({**PLAN, "?p": "colwise"}, "'up' and '?p' both match up, which can be split only once"),
        ({**PLAN, "up": "gather", "u*": "gather"}, "'up' and 'u*' both match up, which"),
        ({**PLAN, "down": "colwise"}, "down.out_features = 8 does not divide over tp = 3"),
    ],
    ids=[
        "no plan",
        "unmatched pattern",
        "unknown style",
        "wrong module type",
        "uncovered norm",
        "gather covers nothing",
        "two patterns",
        "two gathers",
        "indivisible",
    ],
)
def test_invalid_tp_plan_raises(plan: dict[str, str] | None, message: str) -> None:
    model: Any = TwoLinears()
    if plan is not None:
        model.tp_plan = plan
    with pytest.raises(ConfigError) as caught:
        tensor_parallel.check(model, context(Layout(tp=3)))
    assert message in caught.value.message


def test_star_matches_one_component_of_a_name() -> None:
    matches = tensor_parallel.match_plan(decoder(), {"layers.*.attention": "gather", "*": "sequence"})
    assert [name for _, name, _, style in matches if style == "gather"] == ["layers.0.attention", "layers.1.attention"]
    assert all("." not in name for _, name, _, _ in tensor_parallel.match_plan(decoder(), {"*": "sequence"}))


def test_gpu_only_features_raise_on_cpu() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.async_tp"):
        tensor_parallel.check(decoder(), context(Layout(tp=2), async_tp=True, compile=True))
    with pytest.raises(ConfigError, match=r"ring.*GPUs only"):
        context_parallel.check(decoder(), context(Layout(cp=2), context_parallel_method="ring"))


def test_model_without_self_attention_raises() -> None:
    with pytest.raises(ConfigError, match="would only attend inside each of the 2 chunks"):
        context_parallel.check(TwoLinears(), context(Layout(cp=2)))
    context_parallel.check(decoder(), context(Layout(cp=2)))


def test_shard_sequence_splits_each_tensor() -> None:
    x = torch.arange(24).view(2, 12)
    pair = ({"ids": x, "words": x[..., None]}, x + 1)
    meshes: list[Any] = [SimpleNamespace(size=lambda: 3, get_local_rank=lambda r=r: r) for r in range(3)]
    chunks = [context_parallel.shard_sequence(pair, mesh) for mesh in meshes]
    assert torch.equal(torch.cat([inputs["ids"] for inputs, _ in chunks], 1), x)
    assert torch.equal(torch.cat([inputs["words"] for inputs, _ in chunks], 1), x[..., None])
    assert torch.equal(torch.cat([target for _, target in chunks], 1), x + 1)
    with pytest.raises(UsageError, match=r"shape \(2,\)"):
        context_parallel.shard_sequence((x, torch.zeros(2)), meshes[0])
    with pytest.raises(ConfigError, match=r"10 does not divide over cp = 3: 10 / 3 = 3\.33333"):
        context_parallel.shard_sequence((x[:, :10], x), meshes[0])


def test_check_works_without_a_recipe() -> None:
    # A session outside a run has no recipe.
    without_recipe = replace(context(Layout(tp=2)), spec=None)
    tensor_parallel.check(decoder(dropout=0.1), without_recipe)


@pytest.mark.parametrize(
    ("capability", "cudnn", "deprioritized", "preferred"),
    [((9, 0), 92_000, "", True), ((10, 0), 92_000, "", True), ((10, 3), 91_501, "", True), ((9, 0), 91_500, "", False),
     ((9, 0), 91_002, "", False), ((9, 0), None, "", False), ((8, 0), 92_000, "", False), ((12, 0), 92_000, "", False),
     ((9, 0), 92_000, "1", False)],
)  # fmt: skip
def test_grouped_attention_with_a_mask_needs_a_cudnn_that_torch_prefers(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cudnn: int | None, deprioritized: str, preferred: bool
) -> None:
    """Elsewhere, torch would take plain products, whose scores grow with the length squared."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", deprioritized)
    assert context_parallel.prefers_cudnn(torch.device("cuda", 0)) == preferred
    assert not context_parallel.prefers_cudnn(CPU)

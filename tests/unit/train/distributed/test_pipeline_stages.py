"""Split of a model into pipeline stages."""

from __future__ import annotations

import itertools
import random
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed import pipeline_stages
from clustertrain.train.distributed.pipeline_stages import MATMUL_COST
from clustertrain.train.models.decoder import Decoder

TWO_STAGES = Layout(pp=2, schedule="1f1b")


def decoder(**kw: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelSpec(**{"vocab_size": 256, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, **kw}))


def param_names(parts: list[nn.Module]) -> list[set[str]]:
    return [{n for n, _ in part.named_parameters()} for part in parts]


def test_balance_minimizes_peak_then_squares() -> None:
    rng = random.Random(1)
    for _ in range(200):
        cost = [rng.choice([1, 10, 10, 10, 50]) for _ in range(rng.randint(2, 8))]
        count = rng.randint(1, len(cost))

        def sums(starts: tuple[int, ...], cost: list[int] = cost) -> list[int]:
            return [sum(cost[a:b]) for a, b in zip(starts, (*starts[1:], len(cost)), strict=True)]

        cuts = [(0, *c) for c in itertools.combinations(range(1, len(cost)), count - 1)]
        peak, squares = min((max(sums(c)), sum(x * x for x in sums(c))) for c in cuts)
        stage_costs = sums(tuple(pipeline_stages.balance_stages(cost, count)))
        assert max(stage_costs) == peak and sum(x * x for x in stage_costs) == squares


def test_embedding_lookup_costs_little_and_the_head_much() -> None:
    model = decoder(vocab_size=4096, dim=64)
    cost = pipeline_stages.estimate_costs(model, pipeline_stages.list_units(model))
    layer = cost[1]
    assert cost[0] < 0.1 * layer * 4096 / 256
    assert cost[-1] / MATMUL_COST == pytest.approx(4096 * 64, rel=0.01)
    tied = decoder(vocab_size=4096, dim=64, tie_embeddings=True)
    tied_cost = pipeline_stages.estimate_costs(tied, pipeline_stages.list_units(tied))
    assert tied_cost[-1] / MATMUL_COST == pytest.approx(4096 * 64, rel=0.01)


def test_spare_layers_are_in_late_stages() -> None:
    """Equal splits cost the same, whatever the rounding: 80 layers of Llama 3.1 70B's size in 8 stages."""
    layer = 855_638_016 * MATMUL_COST
    starts = pipeline_stages.balance_stages([1_050_673_152, *[layer] * 80, 1_050_673_152 * MATMUL_COST], 8)
    assert [b - a for a, b in itertools.pairwise([*starts, 82])] == [11, 10, 10, 10, 10, 10, 11, 10]


def test_large_head_shifts_layers_to_other_stages() -> None:
    small = pipeline_stages.balance_stages(
        pipeline_stages.estimate_costs(m := decoder(layers=8), pipeline_stages.list_units(m)), 2
    )
    large = pipeline_stages.balance_stages(
        pipeline_stages.estimate_costs(m := decoder(layers=8, vocab_size=2048), pipeline_stages.list_units(m)), 2
    )
    assert small == [0, 5]
    assert large[1] > small[1]


def test_stages_partition_the_parameters() -> None:
    whole = param_names([decoder()])[0]
    for layout in (TWO_STAGES, *(Layout(pp=2, schedule=s, virtual_stages=2) for s in ("interleaved", "zbv"))):
        parts = [part for rank in range(2) for part in pipeline_stages.split_into_stages(decoder(), layout, (), rank)]
        names = param_names(parts)
        assert set().union(*names) == whole
        assert sum(map(len, names)) == len(whole)
        assert {pipeline_stages.get_stage_info(p).index for p in parts} == set(range(len(parts)))
        assert all(pipeline_stages.get_stage_info(p).global_fqns == whole for p in parts)


def test_stage_ranks_of_zbv_and_interleaved() -> None:
    assert pipeline_stages.assign_stage_ranks(Layout(pp=3, schedule="zbv", virtual_stages=2)) == (0, 1, 2, 2, 1, 0)
    assert pipeline_stages.assign_stage_ranks(Layout(pp=3, schedule="interleaved", virtual_stages=2)) == (
        0,
        1,
        2,
        0,
        1,
        2,
    )
    parts = pipeline_stages.split_into_stages(decoder(), Layout(pp=2, schedule="zbv", virtual_stages=2), (), 0)
    assert "embed.weight" in param_names(parts)[0]
    assert "head.weight" in param_names(parts)[1]


def test_tied_embedding_is_in_first_and_last_stage() -> None:
    parts = [
        pipeline_stages.split_into_stages(decoder(tie_embeddings=True), TWO_STAGES, (), rank)[0] for rank in range(2)
    ]
    assert all("embed.weight" in names for names in param_names(parts))
    assert all(pipeline_stages.get_stage_info(p).shared == {"embed.weight": (0, 1)} for p in parts)


def test_split_names_the_first_unit_of_stages() -> None:
    parts = [pipeline_stages.split_into_stages(decoder(), TWO_STAGES, ("layers.1",), rank)[0] for rank in range(2)]
    assert list(parts[0].layers) == ["0"]
    assert list(parts[1].layers) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("split", "error"),
    [
        (("layer.1",), r"no unit 'layer\.1'(.|\n)*layers\.1"),
        ((), r"5 pipeline stages .* but only 4 units"),
        (("layers.0",), r"names 1 units, but 5 stages need 4"),
    ],
    ids=["unknown unit", "too few units", "too few names"],
)
def test_invalid_split_raises(split: tuple[str, ...], error: str) -> None:
    layout = Layout(pp=5, schedule="gpipe")
    with pytest.raises(ConfigError, match=error):
        pipeline_stages.split_into_stages(decoder(layers=2 if not split else 8), layout, split, 0)


@pytest.mark.parametrize("split", [("layers.2", "layers.1"), ("layers.1", "layers.1"), ("embed", "layers.1")])
def test_split_out_of_order_raises(split: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{split[-1] if split[0] != 'embed' else 'embed'}' does not come after"):
        pipeline_stages.split_into_stages(decoder(), Layout(pp=3, schedule="gpipe"), split, 0)


def test_sequential_keeps_names_and_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.ones(3, 4)
    expected = model(x)
    torch.manual_seed(0)
    copy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    first = pipeline_stages.split_into_stages(model, TWO_STAGES, ("2",), 0)[0]
    last = pipeline_stages.split_into_stages(copy, TWO_STAGES, ("2",), 1)[0]
    assert param_names([first, last]) == [{"0.weight", "0.bias"}, {"2.weight", "2.bias", "4.weight", "4.bias"}]
    assert torch.equal(last(first(x)), expected)


class TwoUnits(nn.Module):
    pipeline_units: ClassVar[Any] = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


def test_unsplittable_models_raise() -> None:
    with pytest.raises(ConfigError, match=r"Bilinear cannot be split(.|\n)*pipeline_units"):
        pipeline_stages.split_into_stages(nn.Bilinear(2, 2, 2), TWO_STAGES, (), 0)
    model = TwoUnits()
    model.pipeline_units = ("a", "c")  # type: ignore[misc]
    with pytest.raises(ConfigError, match="no module 'c'"):
        pipeline_stages.split_into_stages(model, TWO_STAGES, (), 0)
    model.pipeline_units = ("a",)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"parameter b\.weight is in no unit"):
        pipeline_stages.split_into_stages(model, TWO_STAGES, (), 0)
    tied = TwoUnits()
    tied.b.weight = tied.a.weight
    with pytest.raises(ConfigError, match=r"a\.weight and b\.weight are one parameter"):
        pipeline_stages.split_into_stages(tied, TWO_STAGES, (), 0)
    with pytest.raises(ConfigError, match=r"stage 1 \(1\) would have no parameters"):
        pipeline_stages.split_into_stages(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), TWO_STAGES, (), 0)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_trained_stage_after_frozen_ones_is_refused_with_a_split_backward(schedule: str) -> None:
    """Its weights would get no gradient, without an error of torch."""

    def split(schedule: str, *trained: str) -> None:
        model = decoder()
        for name, p in model.named_parameters():
            p.requires_grad = name.startswith(trained)
        pipeline_stages.split_into_stages(model, Layout(pp=2, schedule=schedule, virtual_stages=2), (), 0)

    message = f"schedule {schedule} with frozen pipeline stages: nothing is trained before stage 3"
    with pytest.raises(ConfigError, match=message):
        split(schedule, "layers.3", "norm", "head")
    split("interleaved", "layers.3", "norm", "head")
    split(schedule, "embed")
    split(schedule, "")

"""What the plan says of the learning rate at its batch."""

from __future__ import annotations

import pytest

from clustertrain.errors import ConfigError
from clustertrain.plan.advice import LINEAR, SQUARE_ROOT, scaled_lr
from clustertrain.plan.planner import Plan, plan
from clustertrain.spec.cluster import ClusterProfile
from clustertrain.spec.data import DataSpec
from clustertrain.spec.job import JobSpec, RunSpec
from clustertrain.spec.models import ConvnetSpec
from clustertrain.spec.optim import OptimSpec
from clustertrain.spec.recipe import ModelSpec, Recipe, TrainSpec
from clustertrain.spec.strict import build

LR = OptimSpec().lr


def planned(*, batch: int = 0, lr_batch: int = 0, gpus: int = 2, model: ModelSpec | None = None) -> Plan:
    recipe = Recipe(
        model=model or ModelSpec(),
        data=DataSpec(seq_len=128),
        train=TrainSpec(global_batch=batch),
        optim=OptimSpec(lr_batch=lr_batch),
    )
    return plan(RunSpec(job=JobSpec(gpus=gpus, gpu_type="h100"), recipe=recipe), ClusterProfile(), "cuda")


def said(made: Plan, start: str) -> str:
    (found,) = [reason for reason in made.reasons if reason.startswith(start)]
    return found


@pytest.mark.parametrize(
    ("times", "power", "lr"),
    [
        (4, LINEAR, 4e-3),
        (4, SQUARE_ROOT, 2e-3),
        (0.25, SQUARE_ROOT, 5e-4),
        (1, LINEAR, 1e-3),
        (2, SQUARE_ROOT, 1.41e-3),
    ],
)
def test_a_rate_scales_linearly_or_with_the_square_root(times: float, power: float, lr: float) -> None:
    assert scaled_lr(1e-3, times, power) == lr


def test_the_tokens_of_a_step_are_in_the_arithmetic() -> None:
    assert "64 x 128 = 8192 tokens a step" in said(planned(batch=64), "batch: 64 = ")
    images = planned(batch=64, model=ModelSpec(kind="convnet", convnet=ConvnetSpec()))
    assert "tokens" not in said(images, "batch: 64 = ")


def test_a_batch_that_was_named_leaves_the_rate_alone_on_any_number_of_ranks() -> None:
    for gpus in (1, 2, 8):
        made = planned(batch=64, gpus=gpus)
        assert made.batch.global_batch == 64
        assert said(made, "lr ").startswith(f"lr {LR:g}: stays as it is on another number of ranks")


def test_a_batch_that_follows_from_the_ranks_says_how_to_keep_it_and_how_to_follow_it() -> None:
    made = planned(gpus=48)
    reason = said(made, "lr ")
    assert made.batch.global_batch == 48
    assert "a batch of 48, which follows from 48 data-parallel ranks" in reason
    assert "train.global_batch = 48" in reason
    assert "optim.lr = 0.000424" in reason and "SGD 0.0006 " in reason
    assert "2205.10287" in reason and "1706.02677" in reason


def test_a_rate_for_another_batch_is_not_scaled_and_the_number_to_type_is_there() -> None:
    reason = said(planned(batch=64, lr_batch=16), "lr ")
    assert "4 times that. Nothing is scaled: say optim.lr = 0.0006 and optim.lr_batch = 64" in reason
    followed = OptimSpec(lr=6e-4, lr_batch=64)
    again = RunSpec(recipe=Recipe(optim=followed, train=TrainSpec(global_batch=64)))
    assert "stays as it is" in said(plan(again, ClusterProfile(), "cpu"), "lr ")


def test_a_smaller_batch_wants_a_smaller_rate() -> None:
    assert "0.25 times that. Nothing is scaled: say optim.lr = 0.00015 and" in said(
        planned(batch=16, lr_batch=64), "lr "
    )


@pytest.mark.parametrize(("batch", "warned"), [(512, False), (520, True), (1024, True)])
def test_past_32_times_it_warns(batch: int, warned: bool) -> None:
    made = planned(batch=batch, lr_batch=16)
    found = [w for w in made.warnings if "optim.lr was found for" in w]
    assert bool(found) is warned
    if warned:
        assert "train.global_batch = 512 or less" in found[0] and found[0] in made.reasons
        assert not any(r.startswith("lr ") for r in made.reasons)


def test_the_key_must_be_a_batch() -> None:
    assert build({"optim": {"lr_batch": 256}}, Recipe, "r.toml").optim.lr_batch == 256
    with pytest.raises(ConfigError, match="lr_batch = -1: must be 0"):
        build({"optim": {"lr_batch": -1}}, Recipe, "r.toml")

"""Notes on settings that are far from common practice."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.checkpoint import CheckpointSpec
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.optimizers import OPTIMIZERS, OptimizerName
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.plan.cost.hardware_rates import find_gpu_type
from clustertrain.plan.explain import practice
from clustertrain.plan.planner import plan


def recipe(**tables: Any) -> Recipe:
    return build(tables, Recipe, "recipe")


@pytest.mark.parametrize(
    ("optim", "note"),
    [
        ({"name": "sgd", "lr": 3e-4}, "33.3 times below the usual rates of sgd, 0.01 to 0.5"),
        ({"name": "sgd", "lr": 0.1}, ""),
        ({"lr": 1.0}, "1e+03 times above the usual rates of adamw"),
        ({"lr": 8e-5}, ""),
        ({"lr": 1e-6}, "100 times below"),
        ({"name": "lion", "lr": 1e-2}, "33.3 times above"),
        ({"lr": 1e-6, "freeze": ["embed"]}, ""),
    ],
    ids=str,
)
def test_rate_far_from_the_usual_ones_is_noted(optim: dict[str, Any], note: str) -> None:
    warnings = practice.lr_warnings(recipe(optim=optim))
    assert note in warnings[0] if note else not warnings, warnings


def test_usual_rates_are_ranges() -> None:
    assert all(0 < low < high < 1000 for low, high in (entry.usual_lr for entry in OPTIMIZERS.values()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_default_rate_is_noted_only_for_optimizers_of_other_rates(name: OptimizerName) -> None:
    assert bool(practice.lr_warnings(recipe(optim={"name": name}))) == (name in ("sgd", "lars"))


@pytest.mark.parametrize(
    ("schedule", "steps", "is_warning", "note"),
    [
        ({"warmup_steps": 0}, 1000, True, "no warmup: a transformer may diverge"),
        ({}, 1000, False, ""),
        ({"warmup_steps": 100}, 100_000, False, "warmup of 100 steps, 0.1% of the run: 1 to 10 %"),
        ({"warmup_steps": 1500}, 1_000_000, False, ""),
        ({"warmup_ratio": 0.3}, 100_000, False, "spends steps at a low rate"),
        ({"kind": "one-cycle"}, 1000, False, ""),
    ],
)
def test_warmup_of_a_transformer(schedule: dict[str, Any], steps: int, is_warning: bool, note: str) -> None:
    reasons, warnings = practice.explain_warmup(recipe(schedule=schedule, train={"steps": steps}))
    found, others = (warnings, reasons) if is_warning else (reasons, warnings)
    assert not others and (note in found[0] if note else not found)


def test_warmup_of_a_convnet_is_not_noted() -> None:
    assert practice.explain_warmup(recipe(model={"kind": "convnet"}, schedule={"warmup_steps": 0})) == ([], [])


@pytest.mark.parametrize(
    ("gpu", "precision", "note"),
    [
        ("a100", "fp16", "needs no loss scale"),
        ("a100", "fp32", "several times faster"),
        ("a100", "tf32", ""),
        ("v100", "fp16", ""),
    ],
)
def test_precision_below_what_the_gpu_offers(gpu: str, precision: Any, note: str) -> None:
    warnings = practice.precision_warnings(precision, find_gpu_type(gpu, ClusterProfile()))
    assert note in warnings[0] if note else not warnings


def test_more_than_an_hour_between_checkpoints_is_noted() -> None:
    (note,) = practice.lost_time_warnings(CheckpointSpec(every=100), 59.6, 100_000)
    assert "a failure loses up to 99 minutes" in note and "'auto' or '30min'" in note
    for every, step_s in ((100, 30.0), ("auto", 59.6), ("30min", 59.6), (100, None)):
        assert not practice.lost_time_warnings(CheckpointSpec(every=every), step_s, 100_000)
    assert not practice.lost_time_warnings(CheckpointSpec(every=100), 59.6, 50)


def test_plan_has_the_notes() -> None:
    tables = {"model": {"dim": 1024, "layers": 8, "heads": 8, "kv_heads": 8}, "train": {"precision": "fp16"}}
    spec = RunSpec(job=JobSpec(gpu_type="a100"), recipe=recipe(**tables, schedule={"warmup_steps": 0}))
    warnings = plan(spec, ClusterProfile(), "cuda").warnings
    assert any("no warmup" in w for w in warnings) and any("supports bf16" in w for w in warnings)

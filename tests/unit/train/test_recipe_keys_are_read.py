"""Recipe keys that the optimizer, schedule, objective and clipping read, and those that submission accepts."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
import torch

from clustertrain.config.checks.unused_keys import unused_reason
from clustertrain.config.objective import ObjectiveKind, ObjectiveSpec
from clustertrain.config.optim import ClipMethod, OptimSpec
from clustertrain.config.optimizers import OptimizerName
from clustertrain.config.recipe import Recipe
from clustertrain.config.schedule import ScheduleKind, ScheduleSpec
from clustertrain.train.models import losses
from clustertrain.train.models.contrastive import ContrastiveLoss
from clustertrain.train.optim import registry
from clustertrain.train.optim.lr_schedule import LearningRate
from clustertrain.train.stability import clipping
from clustertrain.train.stability.ring_buffer import RingBuffer

CPU = torch.device("cpu")


def accepted_keys(table: str, recipe: Recipe, keys: Any) -> set[str]:
    return {key for key in keys if unused_reason(recipe, f"{table}.{key}") is None}


KEYS_OF_ALL_OPTIMIZERS = {
    "name", "lr", "lr_reference_batch", "weight_decay", "weight_decay_scale", "layer_decay", "lr_scale", "freeze",
    "unfreeze", "clip", "clip_norm", "clip_value", "clip_quantile",
}  # fmt: skip


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_optimizer_keys_match_its_options(name: OptimizerName) -> None:
    others = {"betas": (0.5, 0.6), "eps": 1e-3, "momentum": 0.4, "nesterov": True}
    assert others.keys() == set(OptimSpec.__struct_fields__) - KEYS_OF_ALL_OPTIMIZERS, "a condition in unused_keys?"
    spec = OptimSpec(name=name)

    def options(spec: OptimSpec) -> Any:
        return registry.build_options(spec, is_text=True, device=CPU)

    used = {k for k, v in others.items() if options(msgspec.structs.replace(spec, **{k: v})) != options(spec)}
    assert accepted_keys("optim", Recipe(optim=spec), others) == used


SCHEDULE_VALUES: dict[str, Any] = {
    "warmup_steps": 7, "floor": 0.3, "milestones": (20,), "gamma": 0.7, "cooldown_steps": 31, "rise": 0.6,
    "initial": 0.3, "final": 0.5, "warmup_ratio": 0.07, "cycle_momentum": False, "max_momentum": 0.99,
    "min_momentum": 0.8, "factor": 0.9, "patience": 1, "threshold": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_schedule_keys_match_those_read(kind: ScheduleKind) -> None:
    assert SCHEDULE_VALUES.keys() == set(ScheduleSpec.__struct_fields__) - {"kind", "warmup_epochs", "milestone_epochs"}
    spec = ScheduleSpec(kind=kind)

    def rates(spec: ScheduleSpec) -> list[float | None]:
        rate, values = LearningRate(spec, peak=1.0, total=100), list[float | None]()
        for step in range(1, 101):
            values += [rate.at(step), rate.momentum_at(step)]
            rate.observe(1.0 - 0.001 * step if step < 50 else 2.0)  # improves by less than the changed threshold
        return values

    used = {k for k, v in SCHEDULE_VALUES.items() if rates(msgspec.structs.replace(spec, **{k: v})) != rates(spec)}
    validated = {"data": {"validation": 0.1}, "evaluation": {"every": 5}}
    recipe = msgspec.convert({**validated, "schedule": {"kind": kind}}, Recipe)
    assert accepted_keys("schedule", recipe, SCHEDULE_VALUES) == used


@pytest.mark.parametrize("kind", [k for k in get_args(ObjectiveKind) if k != "auto"])
def test_objective_keys_match_its_arguments(kind: ObjectiveKind) -> None:
    own = ("ignore_index", "delta", "temperature", "group", "beta")
    names = {"label_smoothing": "smoothing", **{key: key for key in own}}
    assert names.keys() == set(ObjectiveSpec.__struct_fields__) - {"kind"}
    # DPO is for conversations and the built-in decoder.
    chat = {"data": {"kind": "chat", "path": "x", "tokenizer": "x"}}
    subject: dict[str, Any] = chat if kind == "dpo" else {"model": {"entry": "a:b"}}
    recipe = msgspec.convert({**subject, "objective": {"kind": kind}}, Recipe)
    loss = losses.build_loss(recipe)
    arguments = vars(loss) if isinstance(loss, ContrastiveLoss) else getattr(loss, "keywords", {})
    assert accepted_keys("objective", recipe, names) == {
        key for key, argument in names.items() if argument in arguments
    }


@pytest.mark.parametrize("method", get_args(ClipMethod))
def test_clipping_keys_match_those_read(method: ClipMethod) -> None:
    others = {"clip_norm": 0.5, "clip_value": 0.01, "clip_quantile": 0.6}

    def clip_gradients(**options: float) -> list[float]:
        gradients = []
        for count in (0, 100):
            norms = RingBuffer(100, CPU)
            for i in range(count):
                norms.push(torch.tensor(2.0 + 0.1 * i))
            weight = torch.nn.Parameter(torch.zeros(1))
            weight.grad = torch.tensor([20.0])
            norm, clip_options = weight.grad.norm(), clipping.Clipping.from_spec(OptimSpec(clip=method, **options))
            limit = clipping.compute_norm_limit(clip_options, norms, CPU)
            clipping.scale_and_clip(clip_options, [weight], torch.ones(()), norm, limit)
            gradients.append(float(weight.grad))
        return gradients

    used = {key for key, value in others.items() if clip_gradients(**{key: value}) != clip_gradients()}
    assert accepted_keys("optim", Recipe(optim=OptimSpec(clip=method)), others) == used

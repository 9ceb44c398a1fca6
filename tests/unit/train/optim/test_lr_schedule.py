"""Learning-rate schedules: fixed points, resume and metric-driven decay."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.config.schedule import ScheduleKind, ScheduleSpec
from clustertrain.errors import UsageError
from clustertrain.train import trainer
from clustertrain.train.optim.lr_schedule import LearningRate, set_lr, unscaled_lr


def rate(total: int, *, peak: float = 1.0, **spec: Any) -> LearningRate:
    return LearningRate(ScheduleSpec(**spec), peak=peak, total=total)


def optimizer(lr: float = 1.0, **group: Any) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], **group}], lr=lr, momentum=0.9)


@pytest.mark.parametrize(("step", "lr"), [(1_000, 2e-4), (5_000, 1e-3), (52_500, 5e-4), (100_000, 0.0)])
def test_cosine_fixed_points(step: int, lr: float) -> None:
    assert rate(100_000, peak=1e-3, warmup_steps=5_000, floor=0.0).at(step) == pytest.approx(lr, abs=1e-18)


def test_floor_is_relative_to_peak_and_holds_after_the_end() -> None:
    for kind in ("cosine", "linear", "wsd"):
        learning_rate = rate(100, peak=2.0, warmup_steps=10, floor=0.1, kind=kind)
        assert learning_rate.at(100) == pytest.approx(0.2)
        assert learning_rate.at(150) == pytest.approx(0.2)


def test_warmup_defaults_to_two_percent_and_can_be_zero() -> None:
    assert ScheduleSpec().resolve_warmup_steps(1_000) == 20
    assert ScheduleSpec().resolve_warmup_steps(10) == 1
    assert ScheduleSpec(warmup_steps=0).resolve_warmup_steps(1_000) == 0
    assert rate(100, warmup_steps=0, floor=0.0).at(1) < 1.0


@pytest.mark.parametrize("kind", [k for k in get_args(ScheduleKind) if k != "one-cycle"])
def test_warmup_is_linear_except_for_one_cycle(kind: ScheduleKind) -> None:
    learning_rate = rate(1_000, kind=kind, warmup_steps=50)
    assert [learning_rate.at(s) for s in (1, 25, 50)] == pytest.approx([0.02, 0.5, 1.0])


def test_fixed_points_of_the_other_schedules() -> None:
    assert rate(110, kind="linear", warmup_steps=10, floor=0.0).at(60) == pytest.approx(0.5)
    steps = rate(100, kind="step", warmup_steps=0, milestones=(30, 60), gamma=0.1)
    assert [steps.at(s) for s in (30, 31, 60, 61)] == pytest.approx([1.0, 0.1, 0.1, 0.01])
    assert rate(90, kind="step", warmup_steps=0).at(31) == pytest.approx(0.1)  # thirds of the run
    wsd = rate(1_000, kind="wsd", warmup_steps=10, cooldown_steps=200, floor=0.0)
    assert [wsd.at(s) for s in (10, 800, 900, 1_000)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert rate(1_000, kind="constant", warmup_steps=0).at(999) == 1.0


def test_one_cycle_matches_torch() -> None:
    total, theirs = 200, optimizer()
    torch_schedule = torch.optim.lr_scheduler.OneCycleLR(
        theirs, max_lr=1.0, total_steps=total, pct_start=0.305, div_factor=25, final_div_factor=1e4,
        cycle_momentum=False,
    )  # fmt: skip
    # torch counts steps from 0, and our peak is at the rounded fraction: step 61 of 200.
    ours = rate(total, kind="one-cycle", rise=0.305, initial=0.04, final=1e-4)
    for step in range(1, total + 1):
        assert ours.at(step) == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-2, abs=1e-9), step
        theirs.step()
        if step < total:
            torch_schedule.step()
    assert ours.at(1) == pytest.approx(0.04)
    assert ours.at(61) == 1.0
    assert ours.at(total) == pytest.approx(4e-6)


def test_plateau_matches_torch() -> None:
    theirs = optimizer()
    torch_schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, factor=0.5, patience=2, threshold=1e-2)
    ours = rate(1_000, kind="plateau", warmup_steps=0, factor=0.5, patience=2, threshold=1e-2, floor=0.0)
    generator = torch.Generator().manual_seed(1)
    values = (torch.rand(60, generator=generator) + torch.linspace(2, 0, 60)).tolist()
    seen = set()
    for n, value in enumerate(values):
        torch_schedule.step(value)
        ours.observe(value)
        assert ours.at(n + 1) == theirs.param_groups[0]["lr"]
        seen.add(ours.at(n + 1))
    assert len(seen) > 3


def test_plateau_respects_direction_and_floor() -> None:
    spec = ScheduleSpec(kind="plateau", warmup_steps=0, factor=0.1, patience=1, floor=0.05)
    learning_rate = LearningRate(spec, peak=1.0, total=100, higher_is_better=True)
    for value in (0.1, 0.2, 0.3):
        learning_rate.observe(value)
    assert learning_rate.at(50) == 1.0
    for _ in range(2):
        learning_rate.observe(0.3)
    assert learning_rate.at(50) == pytest.approx(0.1)
    for _ in range(10):
        learning_rate.observe(0.3)
    assert learning_rate.at(50) == 0.05


@pytest.mark.parametrize(
    ("contract", "higher"),
    [
        ({"metric": "validation_accuracy"}, True),
        ({"metric": "validation_loss"}, False),
        ({}, False),
        ({"metric": "score", "mode": "max"}, False),  # the schedule still observes the validation loss
    ],
    ids=["accuracy", "loss", "default", "custom metric"],
)
def test_trainer_sets_the_plateau_direction(
    contract: dict[str, str], higher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ScheduleBuilt(Exception):
        """Carries the direction."""

    def build_schedule(*args: Any, higher_is_better: bool, **kw: Any) -> None:
        raise ScheduleBuilt(higher_is_better)

    monkeypatch.setattr(trainer, "LearningRate", build_schedule)
    tables = {"schedule": {"kind": "plateau"}, "data": {"validation": 0.1}, "contract": contract}
    with pytest.raises(ScheduleBuilt) as caught:
        trainer.build_schedule(build(tables, Recipe, "recipe.toml"), peak=1.0)
    assert caught.value.args == (higher,)


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_resume_at_any_step_continues_the_rates(kind: ScheduleKind) -> None:
    """The steps include warmup, and the validation metric stops falling halfway."""
    total, spec = 60, ScheduleSpec(kind=kind, warmup_steps=10, patience=3)

    def run(learning_rate: LearningRate, first: int) -> list[float]:
        rates = []
        for step in range(first, total + 1):
            rates.append(learning_rate.at(step))
            learning_rate.observe(max(0.5, 1 - step / 50))
        return rates

    whole = run(LearningRate(spec, peak=1.0, total=total), 1)
    assert len(set(whole)) > 5
    for stop in (3, 10, 31, 59):
        before = LearningRate(spec, peak=1.0, total=total)
        for step in range(1, stop + 1):
            before.observe(max(0.5, 1 - step / 50))
        after = LearningRate(spec, peak=1.0, total=total)
        after.load_state_dict(before.state_dict())
        assert run(after, stop + 1) == whole[stop:]


def test_apply_scales_each_group() -> None:
    optimizer_with_scale = torch.optim.SGD(
        [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr_scale": 0.1}], lr=1.0, momentum=0.9
    )
    rate(10, peak=2.0, kind="constant", warmup_steps=0).apply(optimizer_with_scale, 3)
    assert [g["lr"] for g in optimizer_with_scale.param_groups] == pytest.approx([2.0, 0.2])
    assert unscaled_lr(optimizer_with_scale) == 2.0


def test_unscaled_lr_is_exact_with_an_unscaled_group() -> None:
    optimizer_with_scale = torch.optim.SGD(
        [{"params": [torch.zeros(1)], "lr_scale": 10.0}, {"params": [torch.zeros(1)], "lr_scale": 1.0}], lr=1.0
    )
    for lr in (x / 999 for x in range(1, 1000)):
        set_lr(optimizer_with_scale, lr)
        assert unscaled_lr(optimizer_with_scale) == lr


def test_nan_metric_raises_only_for_plateau() -> None:
    with pytest.raises(UsageError, match="validation metric is nan"):
        rate(10, kind="plateau").observe(math.nan)
    rate(10).observe(math.nan)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_cycle_momentum_matches_torch(kind: Any) -> None:
    ours, theirs = (kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    for optimizer in (ours, theirs):
        if kind is torch.optim.SGD:
            optimizer.param_groups[0]["momentum"] = 0.9
    cycle = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.1, total_steps=50, pct_start=0.3)
    # torch's peak is at step 0.3 x 50 - 1, counted from 0.
    learning_rate = rate(50, kind="one-cycle", rise=0.3)

    def momentum(optimizer: torch.optim.Optimizer) -> float:
        group = optimizer.param_groups[0]
        return float(group["momentum"] if kind is torch.optim.SGD else group["betas"][0])

    for step in range(1, 51):
        learning_rate.apply(ours, step)
        assert momentum(ours) == pytest.approx(momentum(theirs)) == learning_rate.momentum_at(step)
        theirs.step()
        if step < 50:
            cycle.step()
    if kind is torch.optim.AdamW:
        assert ours.param_groups[0]["betas"][1] == 0.999


def test_momentum_stays_if_it_is_off_or_not_cycled() -> None:
    still = optimizer()
    for spec in ({"kind": "one-cycle", "cycle_momentum": False}, {"kind": "cosine"}):
        rate(10, **spec).apply(still, 3)
        assert still.param_groups[0]["momentum"] == 0.9 and rate(10, **spec).momentum_at(3) is None
    still.param_groups[0]["momentum"] = 0.0
    rate(10, kind="one-cycle").apply(still, 3)
    assert still.param_groups[0]["momentum"] == 0.0


@pytest.mark.parametrize(
    ("optim", "cycles"),
    [({"name": "sgd"}, True), ({"name": "sgd", "momentum": 0.0}, False), ({"name": "adafactor"}, False), ({}, True)],
)
def test_trainer_cycles_the_momentum_of_optimizers_that_allow_it(optim: dict[str, Any], cycles: bool) -> None:
    recipe = build({"optim": optim, "schedule": {"kind": "one-cycle"}}, Recipe, "recipe")
    assert (trainer.build_schedule(recipe, peak=1.0).momentum_at(5) is not None) == cycles

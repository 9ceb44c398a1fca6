"""The gradient noise scale, compared with that of a problem whose noise is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.stability import StabilitySpec
from clustertrain.errors import ConfigError
from clustertrain.plan import checks
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.models.contrastive import ContrastiveLoss
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.stability.monitor import StabilityMonitor
from clustertrain.train.stability.noise_scale import NoiseScale
from clustertrain.train.stability.step_guard import StepGuard
from clustertrain.train.step.train_step import TrainStep
from tests.unit.train.single_process import ALONE

DIM, MICRO_BATCH = 4000, 4
NOISE, DISTANCE = 2.0, 0.5  # standard deviation of a sample's gradient, and the true gradient, per element
EXPECTED = NOISE**2 / DISTANCE**2  # tr(S) / |G|^2 = 16 samples


class Quadratic(nn.Module):
    """A vector; the gradient of its loss for a sample is their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.full((DIM,), DISTANCE))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.vector - inputs


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return output.square().sum() / 2, torch.tensor(len(output))


def make_step() -> TrainStep:
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    return TrainStep(model, optimizer, ALONE, ProcessGroups(None, None, None, None), None)


def run(step: TrainStep, noise: NoiseScale | None, micro_batches: int = 2, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    batch = [
        (NOISE * torch.randn(MICRO_BATCH, DIM, generator=generator), torch.zeros(MICRO_BATCH))
        for _ in range(micro_batches)
    ]
    positions = [torch.arange(MICRO_BATCH)] * micro_batches
    return step(batch, positions, loss, Clipping(norm=1.0), None, noise)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_noise_scale_is_that_of_the_problem(micro_batches: int) -> None:
    step, noise = make_step(), NoiseScale(ALONE)
    for seed in range(20):
        result = run(step, noise, micro_batches, seed)
    assert float(result.noise_scale) == pytest.approx(EXPECTED, rel=0.1)


def test_measurement_changes_no_step() -> None:
    plain, measured = make_step(), make_step()
    one, other = run(plain, None), run(measured, NoiseScale(ALONE))
    assert one.noise_scale is None and other.noise_scale is not None
    assert torch.equal(one.grad_norm, other.grad_norm)
    assert torch.equal(*(step.optimizer.param_groups[0]["params"][0] for step in (plain, measured)))


def test_single_micro_batch_or_unknown_samples_are_not_measured() -> None:
    step, noise = make_step(), NoiseScale(ALONE)
    assert run(step, noise, micro_batches=1).noise_scale is None
    batch = [(torch.ones(MICRO_BATCH, DIM), torch.zeros(MICRO_BATCH))] * 2
    assert step(batch, None, loss, Clipping(), None, noise).noise_scale is None


def test_bad_step_does_not_count() -> None:
    step, noise = make_step(), NoiseScale(ALONE)
    before = float(run(step, noise).noise_scale)
    batch = [(torch.full((MICRO_BATCH, DIM), torch.nan), torch.zeros(MICRO_BATCH))] * 2
    result = step(batch, [torch.arange(MICRO_BATCH)] * 2, loss, Clipping(), None, noise)
    assert result.skipped and float(result.noise_scale) == before


def test_averages_continue_after_a_resume() -> None:
    step, noise, resumed = make_step(), NoiseScale(ALONE), NoiseScale(ALONE)
    for seed in range(3):
        run(step, noise, seed=seed)
    resumed.load_state_dict(noise.state_dict())
    assert float(run(make_step(), noise).noise_scale) == float(run(make_step(), resumed).noise_scale)


def test_monitor_measures_at_its_interval_and_reads_older_checkpoints() -> None:
    spec = StabilitySpec(noise_scale_every=5)
    monitor = StabilityMonitor(Quadratic(), StepGuard(spec, ALONE.device), dataclasses.replace(ALONE, spec=None))
    assert monitor.noise_scale_for(5) is None  # off by default
    monitor._spec = spec
    assert [step for step in range(1, 11) if monitor.noise_scale_for(step) is not None] == [5, 10]
    state = monitor.state_dict()
    del state["noise"]
    monitor.load_state_dict(state)


@pytest.mark.parametrize(
    ("layout", "micro_batches", "parallel", "problem"),
    [
        (Layout(), 2, {}, ""),
        (Layout(), 1, {}, "one micro-batch"),
        (Layout(strategy="ddp", dp_replicate=2), 1, {}, ""),
        (Layout(strategy="ddp", dp_replicate=2), 1, {"find_unused_parameters": True}, "find_unused_parameters"),
        (Layout(strategy="fsdp", dp_shard=2), 1, {}, "one micro-batch"),
        (Layout(strategy="fsdp", dp_shard=2), 2, {}, ""),
        (Layout(strategy="fsdp", dp_shard=2, tp=2), 2, {}, "splits the model"),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else str(value),
)
def test_layouts_without_two_batch_sizes_are_refused(
    layout: Layout, micro_batches: int, parallel: dict[str, Any], problem: str
) -> None:
    spec, options = StabilitySpec(noise_scale_every=10), ParallelSpec(**parallel)
    checks.check_noise_scale(StabilitySpec(), layout, options, micro_batches)
    if not problem:
        checks.check_noise_scale(spec, layout, options, micro_batches)
        return
    with pytest.raises(ConfigError, match=f"noise_scale_every = 10: .*{problem}"):
        checks.check_noise_scale(spec, layout, options, micro_batches)


def test_loss_of_the_whole_batch_is_refused() -> None:
    spec, layout = StabilitySpec(noise_scale_every=10), Layout()
    with pytest.raises(ConfigError, match="compares all samples"):
        checks.check_noise_scale(spec, layout, ParallelSpec(), 2, compares_batch=True)
    step = make_step()
    assert step.find_noise_problem(2, ContrastiveLoss()) and not step.find_noise_problem(2, ContrastiveLoss(group=2))

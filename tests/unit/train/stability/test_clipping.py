"""Decisions on the device: bad steps, clipping limits, and skipped updates."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.config.optim import OptimSpec
from clustertrain.config.stability import StabilitySpec
from clustertrain.errors import UsageError
from clustertrain.train.distributed import data_parallel
from clustertrain.train.stability import clipping, conditional_step
from clustertrain.train.stability.clipping import ADAPTIVE_WINDOW, MIN_NORMS, Clipping
from clustertrain.train.stability.conditional_step import RunningStatistics
from clustertrain.train.stability.ring_buffer import RingBuffer
from clustertrain.train.stability.step_guard import MAD_TO_SIGMA, MIN_RELATIVE_SPREAD, StepGuard, StepVerdict
from tests.unit.train.single_process import single_process_group

CPU = torch.device("cpu")
LOSSES = [2.0, 2.1, 1.9, 2.05, 1.95, 2.2, 1.8, 2.02] * 3


def make_guard(**spec: Any) -> StepGuard:
    return StepGuard(StabilitySpec(spike_window=16, **spec), CPU)


def check_step(
    guard: StepGuard, loss: float, norm: float = 1.0, clip: Clipping | None = None, count: float = 4.0
) -> StepVerdict:
    total = torch.tensor(loss * count, dtype=torch.float64)
    return guard.check(total, torch.tensor(count, dtype=torch.float64), torch.tensor(norm), clip or Clipping())


def flags(verdict: StepVerdict) -> tuple[bool, bool, bool]:
    return bool(verdict.finite), bool(verdict.spike), bool(verdict.skip)


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf), (-math.inf, math.nan)]
)
def test_nonfinite_steps_are_skipped_in_every_spike_mode(loss: float, norm: float) -> None:
    for spike in ("off", "warn", "skip", "roll-back"):
        assert flags(check_step(make_guard(spike=spike), loss, norm)) == (False, False, True)


def test_masked_step_is_not_bad() -> None:
    verdict = make_guard().check(torch.zeros((), dtype=torch.float64), torch.zeros(()), torch.tensor(0.0), Clipping())
    assert flags(verdict) == (True, False, False) and math.isnan(verdict.loss.item())


def test_spike_threshold_in_robust_deviations() -> None:
    last = LOSSES[-16:]
    median = statistics.median_low(last)
    spread = MAD_TO_SIGMA * statistics.median_low([abs(v - median) for v in last])
    for deviations, spiking in ((7.9, False), (8.1, True)):
        guard = make_guard(spike="skip")
        assert not any(flags(check_step(guard, loss))[1] for loss in LOSSES)
        assert flags(check_step(guard, median + deviations * spread)) == (True, spiking, spiking)


def test_no_spike_before_enough_losses() -> None:
    guard = make_guard(spike="skip")
    assert not any(flags(check_step(guard, loss))[1] for loss in [1.0] * 15 + [1e9])
    assert flags(check_step(guard, 1e9))[1]  # enough losses now; the earlier outlier does not shift the median


def test_tiny_change_of_constant_loss_is_not_a_spike() -> None:
    guard = make_guard(spike="warn")
    for _ in range(16):
        check_step(guard, 2.0)
    assert not flags(check_step(guard, 2.0 * (1 + 7 * MIN_RELATIVE_SPREAD)))[1]
    assert flags(check_step(guard, 2.0 * (1 + 9 * MIN_RELATIVE_SPREAD))) == (True, True, False)


def test_nonfinite_and_low_losses_are_not_spikes() -> None:
    one, other = make_guard(spike="warn"), make_guard(spike="warn")
    for loss in LOSSES:
        check_step(one, loss)
        check_step(other, loss)
    check_step(other, math.nan)
    assert flags(check_step(one, 0.0))[1] is False
    assert [v for v in other.state_dict()["losses"] if not math.isnan(v)] == pytest.approx(LOSSES[-15:], rel=1e-6)


def test_guard_state_survives_a_checkpoint() -> None:
    one, two = make_guard(spike="skip"), make_guard(spike="skip")
    adaptive = Clipping("adaptive", norm=1.0)
    for i, loss in enumerate(LOSSES[:20]):
        check_step(one, loss, 1.0 + i, adaptive)
        one.record_clipped(torch.tensor(i % 2 == 0))
    two.load_state_dict(one.state_dict())
    for loss, norm in ((2.0, 3.0), (9.0, 40.0), (math.nan, 1.0), (2.3, 5.0)):
        first, second = check_step(one, loss, norm, adaptive), check_step(two, loss, norm, adaptive)
        assert flags(first) == flags(second) and first.norm_limit.item() == second.norm_limit.item()
    fractions = [each.record_clipped(torch.tensor(True)).item() for each in (one, two)]
    assert fractions[0] == fractions[1] == pytest.approx(11 / 21)


def test_ring_buffer_restores_from_other_sizes() -> None:
    full = RingBuffer(4, CPU)
    for v in range(6):
        full.push(torch.tensor(float(v)))
    assert full.to_list() == [2.0, 3.0, 4.0, 5.0]
    short, long = RingBuffer(2, CPU), RingBuffer(6, CPU)
    short.fill(full.to_list())
    long.fill(full.to_list())
    long.push(torch.tensor(9.0))
    assert short.to_list() == [4.0, 5.0]
    assert long.to_list()[1:] == [2.0, 3.0, 4.0, 5.0, 9.0] and int(long.count()) == 5


def make_params(*values: list[float]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(len(v))) for v in values]
    for p, v in zip(params, values, strict=True):
        p.grad = torch.tensor(v)
    return params


def clip_gradients(
    mode: Clipping, params: list[nn.Parameter], norms: RingBuffer | None = None, factor: float = 1.0
) -> bool:
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat(grads)) * factor
    limit = clipping.compute_norm_limit(mode, norms or RingBuffer(4, CPU), CPU)
    return bool(clipping.scale_and_clip(mode, params, torch.tensor(factor), norm, limit))


def test_norm_clipping_only_scales_down() -> None:
    params = make_params([6.0, 0.0], [8.0])
    assert clip_gradients(Clipping(norm=1.0), params, factor=0.5)
    assert [p.grad.tolist() for p in params] == [[pytest.approx(0.6), 0.0], [pytest.approx(0.8)]]  # type: ignore[union-attr]
    assert not clip_gradients(Clipping(norm=2.0), params)
    assert not clip_gradients(Clipping(), params)
    assert [p.grad.tolist() for p in params] == [[pytest.approx(0.6), 0.0], [pytest.approx(0.8)]]  # type: ignore[union-attr]


def test_value_clipping_bounds_scaled_elements() -> None:
    params = make_params([6.0, -0.5], [-8.0], [])
    assert clip_gradients(Clipping("value", norm=0.1, value=2.0), params, factor=0.5)
    assert [p.grad.tolist() for p in params] == [[2.0, -0.25], [-2.0], []]  # type: ignore[union-attr]
    assert not clip_gradients(Clipping("value", value=2.0), params)


def test_adaptive_limit_is_a_quantile_of_recent_norms() -> None:
    mode = Clipping("adaptive", norm=3.0, quantile=0.5)
    norms = RingBuffer(ADAPTIVE_WINDOW, CPU)
    for n in range(1, MIN_NORMS):
        norms.push(torch.tensor(float(n)))
    norms.push(torch.tensor(math.nan))  # a step with NaN or Inf
    assert clipping.compute_norm_limit(mode, norms, CPU).item() == 3.0
    norms.push(torch.tensor(16.0))
    assert clipping.compute_norm_limit(mode, norms, CPU).item() == 8.0  # a recorded norm, not interpolated
    assert clipping.compute_norm_limit(Clipping("adaptive"), RingBuffer(4, CPU), CPU).item() == math.inf


def test_clipping_defaults_and_invalid_limits() -> None:
    assert Clipping.from_spec(OptimSpec()) == Clipping("norm", 1.0, 1.0, 0.95)
    for invalid in ({"norm": -1.0}, {"value": 0.0}, {"quantile": 1.5}):
        with pytest.raises(UsageError, match="out of range"):
            Clipping(**invalid)  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_skipped_step_leaves_weights_and_state_unchanged(
    cls: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    optimizer = cls(model.parameters(), lr=0.1, fused=fused, **options)
    assert not conditional_step.supports_device_skip(optimizer)  # on CPU the host reads the flag for free
    if fused:  # fused CPU kernels respect the flag as those on GPU do
        monkeypatch.setattr(conditional_step, "supports_device_skip", lambda optimizer: bool(optimizer.state))

    def step(skip: bool, value: float) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        conditional_step.step_unless(optimizer, torch.tensor(skip))

    def snapshot() -> list[torch.Tensor]:
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*model.parameters(), *states)]

    step(True, math.nan)
    assert not optimizer.state  # a skipped step creates no state
    step(False, 0.5)
    before = snapshot()
    step(True, math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    step(False, 0.5)
    assert not torch.equal(before[0], snapshot()[0])


def test_running_statistics_are_restored() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    statistics_of_model = RunningStatistics(model)
    for skip in (True, False):
        before = [b.clone() for b in model.buffers()]
        statistics_of_model.save()
        model(torch.full((5, 3), math.nan if skip else 1.0))
        statistics_of_model.restore_where(torch.tensor(skip))
        same = [torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True)]
        assert all(same) if skip else not any(same)


class OnGpu(nn.Parameter):
    """Parameter that claims to be on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_device_skip_needs_state_for_all_trained_params() -> None:
    trained, frozen = OnGpu(torch.ones(2)), OnGpu(torch.ones(2))
    optimizer = torch.optim.SGD([trained, frozen], lr=0.1, momentum=0.9, fused=True)
    trained.grad = torch.ones(2)
    assert not conditional_step.supports_device_skip(optimizer)
    optimizer.step()
    assert conditional_step.supports_device_skip(optimizer)
    frozen.grad = torch.ones(2)  # now trained without state
    assert not conditional_step.supports_device_skip(optimizer)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # from torch's import
def test_zero1_does_not_support_device_skip() -> None:
    p = OnGpu(torch.ones(2))
    with single_process_group():
        build = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)
        optimizer = data_parallel.build_zero1_optimizer(build, [{"params": [p]}])
        p.grad = torch.ones(2)
        optimizer.step()
        assert not conditional_step.supports_device_skip(optimizer)

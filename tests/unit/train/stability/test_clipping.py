"""What is decided on the device: which steps are bad, what a gradient is clipped to, who may move."""

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
from tests.unit.train.alone import group_of_one

CPU = torch.device("cpu")
LOSSES = [2.0, 2.1, 1.9, 2.05, 1.95, 2.2, 1.8, 2.02] * 3


def guard(**spec: Any) -> StepGuard:
    return StepGuard(StabilitySpec(spike_window=16, **spec), CPU)


def judged(
    g: StepGuard, loss: float, norm: float = 1.0, clip: Clipping | None = None, count: float = 4.0
) -> StepVerdict:
    total = torch.tensor(loss * count, dtype=torch.float64)
    return g.check(total, torch.tensor(count, dtype=torch.float64), torch.tensor(norm), clip or Clipping())


def flags(j: StepVerdict) -> tuple[bool, bool, bool]:
    return bool(j.finite), bool(j.spike), bool(j.skip)


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf), (-math.inf, math.nan)]
)
def test_what_is_not_finite_is_skipped_whatever_the_recipe_says_of_spikes(loss: float, norm: float) -> None:
    for spike in ("off", "warn", "skip", "roll-back"):
        assert flags(judged(guard(spike=spike), loss, norm)) == (False, False, True)


def test_a_step_that_counts_nothing_is_not_bad() -> None:
    found = guard().check(torch.zeros((), dtype=torch.float64), torch.zeros(()), torch.tensor(0.0), Clipping())
    assert flags(found) == (True, False, False) and math.isnan(found.loss.item())


def test_a_spike_is_so_many_robust_deviations_above_the_median_of_the_last_losses() -> None:
    last = LOSSES[-16:]
    median = statistics.median_low(last)
    spread = MAD_TO_SIGMA * statistics.median_low([abs(v - median) for v in last])
    for deviations, spiking in ((7.9, False), (8.1, True)):
        g = guard(spike="skip")
        assert not any(flags(judged(g, loss))[1] for loss in LOSSES)
        assert flags(judged(g, median + deviations * spread)) == (True, spiking, spiking)


def test_before_there_are_enough_losses_none_is_a_spike() -> None:
    g = guard(spike="skip")
    assert not any(flags(judged(g, loss))[1] for loss in [1.0] * 15 + [1e9])
    assert flags(judged(g, 1e9))[1]  # now there are: one that was far away does not move the median


def test_of_a_loss_that_stands_still_a_tremor_is_no_spike() -> None:
    g = guard(spike="warn")
    for _ in range(16):
        judged(g, 2.0)
    assert not flags(judged(g, 2.0 * (1 + 7 * MIN_RELATIVE_SPREAD)))[1]
    assert flags(judged(g, 2.0 * (1 + 9 * MIN_RELATIVE_SPREAD))) == (True, True, False)


def test_losses_that_are_not_finite_and_those_far_below_change_nothing() -> None:
    one, other = guard(spike="warn"), guard(spike="warn")
    for loss in LOSSES:
        judged(one, loss)
        judged(other, loss)
    judged(other, math.nan)
    assert flags(judged(one, 0.0))[1] is False
    assert [v for v in other.state_dict()["losses"] if not math.isnan(v)] == pytest.approx(LOSSES[-15:], rel=1e-6)


def test_a_guard_goes_on_where_it_was() -> None:
    one, two = guard(spike="skip"), guard(spike="skip")
    adaptive = Clipping("adaptive", norm=1.0)
    for i, loss in enumerate(LOSSES[:20]):
        judged(one, loss, 1.0 + i, adaptive)
        one.record_clipped(torch.tensor(i % 2 == 0))
    two.load_state_dict(one.state_dict())
    for loss, norm in ((2.0, 3.0), (9.0, 40.0), (math.nan, 1.0), (2.3, 5.0)):
        mine, theirs = judged(one, loss, norm, adaptive), judged(two, loss, norm, adaptive)
        assert flags(mine) == flags(theirs) and mine.norm_limit.item() == theirs.norm_limit.item()
    clipped = [each.record_clipped(torch.tensor(True)).item() for each in (one, two)]
    assert clipped[0] == clipped[1] == pytest.approx(11 / 21)


def test_a_ring_takes_what_a_longer_or_shorter_one_held() -> None:
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


def gradients(*values: list[float]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(len(v))) for v in values]
    for p, v in zip(params, values, strict=True):
        p.grad = torch.tensor(v)
    return params


def clipped(how: Clipping, params: list[nn.Parameter], norms: RingBuffer | None = None, factor: float = 1.0) -> bool:
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat(grads)) * factor
    limit = clipping.compute_norm_limit(how, norms or RingBuffer(4, CPU), CPU)
    return bool(clipping.scale_and_clip(how, params, torch.tensor(factor), norm, limit))


def test_a_gradient_is_scaled_down_to_the_norm_and_never_up() -> None:
    params = gradients([6.0, 0.0], [8.0])
    assert clipped(Clipping(norm=1.0), params, factor=0.5)
    assert [p.grad.tolist() for p in params] == [[pytest.approx(0.6), 0.0], [pytest.approx(0.8)]]  # type: ignore[union-attr]
    assert not clipped(Clipping(norm=2.0), params)
    assert not clipped(Clipping(), params)
    assert [p.grad.tolist() for p in params] == [[pytest.approx(0.6), 0.0], [pytest.approx(0.8)]]  # type: ignore[union-attr]


def test_by_value_each_element_lies_between_the_limits_after_the_division() -> None:
    params = gradients([6.0, -0.5], [-8.0], [])
    assert clipped(Clipping("value", norm=0.1, value=2.0), params, factor=0.5)
    assert [p.grad.tolist() for p in params] == [[2.0, -0.25], [-2.0], []]  # type: ignore[union-attr]
    assert not clipped(Clipping("value", value=2.0), params)


def test_the_adaptive_limit_is_a_quantile_of_the_last_norms() -> None:
    how = Clipping("adaptive", norm=3.0, quantile=0.5)
    norms = RingBuffer(ADAPTIVE_WINDOW, CPU)
    for n in range(1, MIN_NORMS):
        norms.push(torch.tensor(float(n)))
    norms.push(torch.tensor(math.nan))  # of a step that was not finite
    assert clipping.compute_norm_limit(how, norms, CPU).item() == 3.0
    norms.push(torch.tensor(16.0))
    assert clipping.compute_norm_limit(how, norms, CPU).item() == 8.0  # one that there was
    assert clipping.compute_norm_limit(Clipping("adaptive"), RingBuffer(4, CPU), CPU).item() == math.inf


def test_the_recipes_keys_and_limits_that_cannot_be() -> None:
    assert Clipping.from_spec(OptimSpec()) == Clipping("norm", 1.0, 1.0, 0.95)
    for wrong in ({"norm": -1.0}, {"value": 0.0}, {"quantile": 1.5}):
        with pytest.raises(UsageError, match="cannot be"):
            Clipping(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_a_skipped_step_leaves_weights_and_state_in_all_bits(
    cls: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    more = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    optimizer = cls(model.parameters(), lr=0.1, fused=fused, **more)
    assert not conditional_step.supports_device_skip(optimizer)  # on a CPU to look costs nothing
    if fused:  # its kernels there heed the flag as those of a GPU do
        monkeypatch.setattr(conditional_step, "supports_device_skip", lambda optimizer: bool(optimizer.state))

    def step(skip: bool, value: float) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        conditional_step.step_unless(optimizer, torch.tensor(skip))

    def everything() -> list[torch.Tensor]:
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*model.parameters(), *states)]

    step(True, math.nan)
    assert not optimizer.state  # there is none of a step that does not count
    step(False, 0.5)
    before = everything()
    step(True, math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    step(False, 0.5)
    assert not torch.equal(before[0], everything()[0])


def test_running_means_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    kept = RunningStatistics(model)
    for skip in (True, False):
        before = [b.clone() for b in model.buffers()]
        kept.save()
        model(torch.full((5, 3), math.nan if skip else 1.0))
        kept.restore_where(torch.tensor(skip))
        same = [torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True)]
        assert all(same) if skip else not any(same)


class OnGpu(nn.Parameter):
    """Says that it lies on one."""

    is_cuda = True  # type: ignore[assignment]


def test_an_optimizer_is_asked_to_skip_by_itself_once_all_that_is_trained_has_state() -> None:
    trained, frozen = OnGpu(torch.ones(2)), OnGpu(torch.ones(2))
    optimizer = torch.optim.SGD([trained, frozen], lr=0.1, momentum=0.9, fused=True)
    trained.grad = torch.ones(2)
    assert not conditional_step.supports_device_skip(optimizer)
    optimizer.step()
    assert conditional_step.supports_device_skip(optimizer)
    frozen.grad = torch.ones(2)  # no longer
    assert not conditional_step.supports_device_skip(optimizer)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own import
def test_of_zero1_the_host_decides_since_ranks_may_own_nothing_that_has_state() -> None:
    p = OnGpu(torch.ones(2))
    with group_of_one():
        build = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)
        optimizer = data_parallel.build_zero1_optimizer(build, [{"params": [p]}])
        p.grad = torch.ones(2)
        optimizer.step()
        assert not conditional_step.supports_device_skip(optimizer)

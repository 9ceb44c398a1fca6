"""The verdict that each check derives from its measurements."""

from __future__ import annotations

import math
import random

import pytest

from clustertrain.diagnose.checks import init_loss, layers, lr_range, overfit, pretrained, resume, speed
from clustertrain.diagnose.checks.init_loss import ExpectedLoss
from clustertrain.diagnose.checks.overfit import OverfitTrial
from clustertrain.diagnose.registry import CHECKS, Verdict, overall_verdict, select_checks, worst_verdict
from clustertrain.errors import UsageError

LN_10 = ExpectedLoss(math.log(10), "ln 10")


def test_unknown_check_raises_with_a_suggestion() -> None:
    assert select_checks("all") == list(CHECKS) and select_checks("resume") == ["resume"]
    with pytest.raises(UsageError) as e:
        select_checks("overfitt")
    assert e.value.fix is not None and "overfit" in e.value.fix


def test_overall_verdict_is_the_worst_and_ignores_skipped() -> None:
    assert worst_verdict([]) == "pass" and worst_verdict(["pass", "fail", "warn"]) == "fail"
    assert overall_verdict(["skipped", "pass"]) == "pass" and overall_verdict(["skipped"]) == "skipped"


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [(2.3026, "pass"), (2.5, "pass"), (2.06, "pass"), (2.7, "warn"), (9.0, "fail"), (0.4, "fail"), (math.nan, "fail")],
)
def test_initial_loss(loss: float, verdict: Verdict) -> None:
    assert init_loss.assess(loss, LN_10)[0] == verdict


def test_model_defined_loss_warns_instead_of_failing() -> None:
    assert init_loss.assess(9.0, LN_10, has_model_loss=True)[0] == "warn"
    assert init_loss.assess(9.0, None)[0] == "skipped"
    assert init_loss.assess(math.inf, None)[0] == "fail"


def linear_trial(first: float, last: float, noise: float = 0.0) -> OverfitTrial:
    values = [first + (last - first) * i / 99 + noise * (-1) ** i for i in range(100)]
    return OverfitTrial(1e-3, values, 0.0)


@pytest.mark.parametrize(
    ("trials", "expected_verdict", "expected_text"),
    [
        ([linear_trial(2.0, 0.0)], "pass", "memorized"),
        ([linear_trial(2.0, 1.9), linear_trial(2.0, 0.01)], "warn", "optim.lr"),
        ([linear_trial(2.0, 0.8)], "warn", "remains"),
        ([linear_trial(2.0, 2.0)], "fail", "does not change"),
        ([linear_trial(2.0, 2.0, noise=1.0)], "fail", "jumps"),
        ([linear_trial(2.0, 1.4)], "fail", "barely falls"),
        ([linear_trial(2.0, math.nan)], "fail", "NaN or Inf"),
    ],
    ids=["memorized", "other-lr", "slow", "flat", "noisy", "barely-falls", "nan"],
)
def test_overfit(trials: list[OverfitTrial], expected_verdict: Verdict, expected_text: str) -> None:
    verdict, text, _ = overfit.assess(trials, 8)
    assert (verdict, expected_text in text) == (expected_verdict, True), text


def lr_sweep() -> tuple[list[float], list[float]]:
    """Return rates and losses that fall from 1e-4 on and rise from 1e-1 on."""
    rates = [10 ** (-7 + 7 * i / 99) for i in range(100)]
    return rates, [3.0 - 2.0 * max(0.0, min(1.0, (math.log10(r) + 4) / 3)) + 20 * max(0.0, r - 0.1) for r in rates]


def test_turning_point_of_the_loss() -> None:
    rates, losses = lr_sweep()
    turning_lr = lr_range.find_turning_point(rates, losses)
    assert turning_lr is not None and 0.08 < turning_lr < 0.12
    assert lr_range.find_turning_point(rates, [3.0] * 100) is None and lr_range.find_turning_point([], []) is None
    rng = random.Random(1)
    noisy = [rng.gauss(3.0, 0.3) for _ in range(100)]
    assert lr_range.find_turning_point(rates, noisy) is None
    assert lr_range.assess(0.05, None, lr_range.smooth_losses(noisy), {})[0] == "warn"


@pytest.mark.parametrize(("lr", "verdict"), [(0.01, "pass"), (0.09, "pass"), (0.5, "fail"), (5e-5, "warn")])
def test_recipe_lr_against_the_suggestion(lr: float, verdict: Verdict) -> None:
    _, losses = lr_sweep()
    assert lr_range.assess(lr, 0.1, losses, {lr: (3.0, 1.0)})[0] == verdict


def test_lr_warns_on_a_diverged_trial_and_fails_without_learning() -> None:
    _, losses = lr_sweep()
    assert lr_range.assess(0.05, 0.1, losses, {0.05: (3.0, math.inf)})[0] == "warn"
    assert lr_range.assess(0.05, None, [3.0] * 100, {})[0] == "fail"
    assert "lowest rate" in lr_range.assess(0.05, None, [], {})[1]


def test_smoothed_loss_is_unbiased_and_divergence_is_detected() -> None:
    assert lr_range.smooth_losses([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert not lr_range.has_diverged([3.0] * 20) and lr_range.has_diverged([3.0] * 20 + [9.0])


@pytest.mark.parametrize(
    ("norms", "verdict"),
    [
        ({"a": 1.0, "b": 2.0, "c": 5.0}, "pass"),
        ({"a": 1.0, "b": 1.0, "c": 20.0}, "warn"),
        ({"a": 1.0, "b": 1.0, "c": 1e-4}, "fail"),
        ({"a": 1.0, "b": 1.0, "c": 0.0}, "fail"),
        ({"a": 0.0, "b": 0.0}, "fail"),
        ({"a": 1.0, "b": math.nan}, "fail"),
    ],
    ids=["similar", "large", "small", "zero", "all-zero", "nan"],
)
def test_gradient_norms_name_the_outlier(norms: dict[str, float], verdict: Verdict) -> None:
    actual, text, _ = layers.assess_norms(norms)
    assert actual == verdict
    if verdict != "pass" and len(norms) == 3:
        assert " c " in text


@pytest.mark.parametrize(("share", "verdict"), [(0.5, "pass"), (0.8, "warn"), (0.97, "fail"), (1.1, "fail")])
def test_first_loss_of_pretrained_weights(share: float, verdict: Verdict) -> None:
    actual, text, fix = pretrained.assess(share * math.log(1000), 1000)
    assert actual == verdict and "ln 1000" in text and ("tokenizer" in fix) == (verdict != "pass")


@pytest.mark.parametrize(("share", "verdict"), [(0.1, "pass"), (0.3, "warn"), (0.5, "fail")])
def test_dead_units(share: float, verdict: Verdict) -> None:
    actual, text, _ = layers.assess_dead_units({"relu": 0.0, "up": share})
    assert actual == verdict and (verdict == "pass" or "up" in text)


def test_activation_rms() -> None:
    assert [layers.assess_activation_rms({"a": v})[0] for v in (1.0, 1e5, 1e-9, 0.0, math.nan)] == [
        "pass", "warn", "warn", "pass", "fail",
    ]  # fmt: skip


ROWS = {n: {"step": n, "loss": 1.0 / n, "grad_norm": 2.0, "lr": 1e-3} for n in range(1, 8)}
RESUMED_ROWS = {n: ROWS[n] for n in range(4, 8)}


def test_resume_compares_to_the_last_bit() -> None:
    changed = {**RESUMED_ROWS, 6: {**ROWS[6], "loss": math.nextafter(ROWS[6]["loss"], 1)}}
    assert resume.find_differences(ROWS, RESUMED_ROWS) == []
    [difference] = resume.find_differences(ROWS, changed)
    assert (difference["step"], difference["name"]) == (6, "loss")
    assert resume.assess(RESUMED_ROWS, 3, [], is_state_equal=True, is_reproducible=None)[0] == "pass"
    assert resume.assess(changed, 3, [difference], is_state_equal=True, is_reproducible=True)[0] == "fail"
    assert resume.assess(changed, 3, [difference], is_state_equal=True, is_reproducible=False)[0] == "warn"
    assert resume.assess(RESUMED_ROWS, 3, [], is_state_equal=False, is_reproducible=True)[0] == "fail"
    restarted = resume.assess(ROWS, 3, [], is_state_equal=True, is_reproducible=None)  # from step 1
    assert restarted[0] == "fail"


@pytest.mark.parametrize(
    ("data_share", "workers", "read_rates", "verdict", "expected_fix"),
    [
        (0.05, 0, {0: 900.0, 1: 800.0}, "pass", ""),
        (0.6, 0, {0: 500.0, 1: 600.0, 2: 1300.0, 4: 2000.0}, "fail", "data.workers = 2"),
        (0.3, 1, {0: 500.0, 1: 600.0, 2: 700.0}, "warn", "too slow"),
        (0.3, 0, {0: 5000.0, 1: 600.0}, "warn", "micro_batch"),
    ],
    ids=["no-wait", "more-workers", "slow-dataset", "slow-workers"],
)
def test_speed_suggests_a_fix_for_data_waits(
    data_share: float, workers: int, read_rates: dict[int, float], verdict: Verdict, expected_fix: str
) -> None:
    actual, _, fix = speed.assess(data_share, workers, read_rates, 1000.0)
    assert actual == verdict and expected_fix in fix

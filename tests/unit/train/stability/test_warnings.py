"""Warnings from the rows of a run: each when it should come, once, and not again for a while."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.config.stability import StabilitySpec
from clustertrain.train.stability.warnings import (
    MASKED_STEPS,
    MAX_BASELINE_STEPS,
    MIN_BASELINE_STEPS,
    RECENT_STEPS,
    REPEAT_INTERVAL_S,
    VANISHING_STEPS,
    WarningReporter,
)


class Told:
    """Collects the events; ``now`` is what the clock says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        self.events: list[dict[str, Any]] = []
        self.warnings = WarningReporter(StabilitySpec(**spec), lambda name, **fields: self.events.append(fields))
        self.step = 0

    def see(self, count: int = 1, **row: Any) -> list[str]:
        """The codes of what is told for ``count`` such rows."""
        before = len(self.events)
        for _ in range(count):
            self.step += 1
            fields = {"loss": 2.0, "grad_norm": 1.0, "skipped": 0, "spike": 0, "clip_fraction": 0.0, **row}
            self.warnings.observe({"step": self.step, **fields})
        return [e["code"] for e in self.events[before:]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_of_a_run_that_is_well_nothing_is_said(told: Told) -> None:
    assert told.see(300, tokens_per_s=100.0, step_s=1.0, **{"dead/relu": 0.4}) == []


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"loss": math.nan, "grad_norm": math.nan, "skipped": 1}, "non_finite"),
        ({"loss": 2.0, "grad_norm": math.inf, "skipped": 1}, "non_finite"),
        ({"spike": 1, "loss": 90.0}, "loss_spike"),
        ({"spike": 1, "loss": 90.0, "skipped": 1}, "loss_spike"),
        ({"grad_norm": 10.1}, "grad_norm_high"),
        ({"dead/layers.0.relu": 0.51, "dead/layers.1.relu": 0.9}, "dead_units"),
    ],
)
def test_what_one_row_tells(told: Told, row: dict[str, Any], code: str) -> None:
    assert told.see(**row) == [code]
    event = told.events[0]
    assert event["step"] == 1 and event["text"] and event["fix"]
    json.dumps(event, allow_nan=False)
    if code == "dead_units":
        assert "layers.1.relu" in event["text"] and event["value"] == 0.9


@pytest.mark.parametrize("row", [{"loss": math.nan, "skipped": 1}, {"spike": 1, "loss": 90.0}])
def test_the_samples_of_the_row_are_in_the_warning(told: Told, row: dict[str, Any]) -> None:
    told.see(bad_samples="the global batch, epoch 0: sample 3", **row)
    assert told.events[0]["text"].endswith("; the global batch, epoch 0: sample 3")


def test_an_overflow_that_the_loss_scale_takes_care_of_is_no_trouble(told: Told) -> None:
    """Its gradient norm is not finite, and the step is skipped."""
    assert told.see(99, grad_norm=math.inf, skipped=1, overflow=1) == []


def test_a_scripts_own_rows_tell_of_what_is_not_finite_too(told: Told) -> None:
    told.warnings.observe({"step": 1, "loss": math.inf})
    told.warnings.observe({"step": 2, "accuracy": 0.5})
    assert [e["code"] for e in told.events] == ["non_finite"] and "not logged" in told.events[0]["text"]


def test_a_step_that_counts_nothing_is_no_trouble(told: Told) -> None:
    assert told.see(loss=math.nan, grad_norm=0.0) == []


def test_steps_in_a_row_that_count_nothing_are_told(told: Told) -> None:
    nothing = {"loss": math.nan, "grad_norm": 0.0}
    assert told.see(MASKED_STEPS - 1, **nothing) == told.see() == []
    assert told.see(VANISHING_STEPS, **nothing) == ["nothing_counted"]


def test_a_nan_that_a_script_logs_for_its_loss_is_none_of_these(told: Told) -> None:
    assert told.see(MASKED_STEPS, loss=math.nan) == []


def test_a_norm_that_stays_near_nothing(told: Told) -> None:
    assert told.see(VANISHING_STEPS - 1, grad_norm=1e-9) == []
    assert told.see(grad_norm=1e-3) == []
    assert told.see(VANISHING_STEPS, grad_norm=1e-9) == ["grad_vanishing"]


def test_clipping_that_is_the_rule_is_told_when_there_are_enough_steps(told: Told) -> None:
    assert told.see(99, clip_fraction=1.0) == []
    assert told.see(clip_fraction=0.51) == ["clipping_often"]
    assert told.events[0]["limit"] == 0.5


def test_the_fix_for_clipping_names_a_limit_and_does_not_lower_a_rate_that_may_be_too_low(told: Told) -> None:
    told.see(99, clip_fraction=1.0, grad_norm=7.5)
    assert told.see(clip_fraction=1.0, grad_norm=7.5) == ["clipping_often"]
    fix = told.events[0]["fix"]
    assert fix.startswith("raise optim.clip_norm above 7.5,")
    assert "Lower the learning rate only if the loss also spikes" in fix


def test_throughput_against_the_runs_own(told: Told) -> None:
    assert told.see(5 + MIN_BASELINE_STEPS + RECENT_STEPS, tokens_per_s=100.0, step_s=8.0) == []
    assert told.see(RECENT_STEPS, tokens_per_s=91.0, step_s=9.0) == []
    assert told.see(MAX_BASELINE_STEPS, tokens_per_s=100.0, step_s=8.0) == []
    assert told.see(RECENT_STEPS // 2, tokens_per_s=80.0, step_s=10.0) == []
    assert told.see(2, tokens_per_s=80.0, step_s=10.0) == ["throughput_drop"]
    assert told.events[0]["value"] == pytest.approx(0.8)


def test_without_tokens_by_samples_and_without_those_by_the_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, slow in (({"samples_per_s": 9.0}, {"samples_per_s": 5.0}), ({}, {})):
        told = Told(monkeypatch)
        assert told.see(5 + MIN_BASELINE_STEPS + RECENT_STEPS, step_s=10.0, **fast) == []
        assert told.see(RECENT_STEPS, step_s=18.0, **slow) == ["throughput_drop"]


def test_a_toy_run_whose_steps_vary_is_told_nothing_of_its_throughput(told: Told) -> None:
    """Steps of milliseconds, for however long; and a minute of longer ones."""
    assert told.see(5 + MIN_BASELINE_STEPS + RECENT_STEPS, step_s=0.002) == []
    assert told.see(20_000, step_s=0.002) == []
    assert told.see(6000, step_s=0.01) == []
    told.warnings = WarningReporter(StabilitySpec(), lambda name, **fields: told.events.append(fields))
    assert told.see(200, step_s=0.2) == []
    assert told.see(80, step_s=0.5) == []


def test_a_drop_of_short_steps_is_told_when_it_has_lasted(told: Told) -> None:
    assert told.see(MAX_BASELINE_STEPS * 10, step_s=0.03) == []
    assert told.see(100, step_s=0.05) == []
    assert told.see(200, step_s=0.05) == ["throughput_drop"]


def test_the_same_is_not_said_again_for_a_while_and_then_with_how_often_it_was(told: Told) -> None:
    assert told.see(5, grad_norm=50.0) == ["grad_norm_high"]
    assert told.see(spike=1) == ["loss_spike"]  # another one is
    told.now += REPEAT_INTERVAL_S
    assert told.see(grad_norm=50.0) == ["grad_norm_high"]
    assert [e["held_back"] for e in told.events] == [0, 0, 4]


def test_what_the_recipe_turns_off(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, grad_norm_limit=0.0, vanishing=0.0, clipped_share=0.0, slowdown=0.0)
    rows = [{"grad_norm": 1e9, "clip_fraction": 1.0, "step_s": 1.0}, {"grad_norm": 0.0, "step_s": 9.0}]
    assert [told.see(300, **row) for row in rows] == [[], []]

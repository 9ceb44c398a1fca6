"""Training warnings derived from the rows of a run."""

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


class WarningRecorder:
    """Collector of a reporter's events; ``now`` is the time of its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        self.events: list[dict[str, Any]] = []
        self.warnings = WarningReporter(StabilitySpec(**spec), lambda name, **fields: self.events.append(fields))
        self.step = 0

    def observe(self, count: int = 1, **row: Any) -> list[str]:
        """Observe ``count`` rows with the values ``row`` and return the codes of the warnings."""
        before = len(self.events)
        for _ in range(count):
            self.step += 1
            fields = {"loss": 2.0, "grad_norm": 1.0, "skipped": 0, "spike": 0, "clip_fraction": 0.0, **row}
            self.warnings.observe({"step": self.step, **fields})
        return [e["code"] for e in self.events[before:]]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> WarningRecorder:
    return WarningRecorder(monkeypatch)


def test_healthy_run_has_no_warnings(recorder: WarningRecorder) -> None:
    assert recorder.observe(300, tokens_per_s=100.0, step_s=1.0, **{"dead/relu": 0.4}) == []


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"loss": math.nan, "grad_norm": math.nan, "skipped": 1}, "non_finite"),
        ({"loss": 2.0, "grad_norm": math.inf, "skipped": 1}, "non_finite"),
        ({"spike": 1, "loss": 90.0}, "loss_spike"),
        ({"spike": 1, "loss": 90.0, "skipped": 1}, "loss_spike"),
        ({"grad_norm": 10.1}, "grad_norm_high"),
        ({"dead/layers.0.relu": 0.51, "dead/layers.1.relu": 0.9}, "dead_units"),
        ({"saturated/layers.0.tanh": 0.51, "dead/layers.1.relu": 0.4}, "saturated_units"),
    ],
    ids=["NaN", "Inf norm", "spike", "skipped spike", "high norm", "dead units", "saturated units"],
)
def test_warnings_from_a_single_row(recorder: WarningRecorder, row: dict[str, Any], code: str) -> None:
    assert recorder.observe(**row) == [code]
    event = recorder.events[0]
    assert event["step"] == 1 and event["text"] and event["fix"]
    json.dumps(event, allow_nan=False)
    if code == "dead_units":
        assert "layers.1.relu" in event["text"] and event["value"] == 0.9


@pytest.mark.parametrize("row", [{"loss": math.nan, "skipped": 1}, {"spike": 1, "loss": 90.0}], ids=["NaN", "spike"])
def test_warning_names_the_samples_of_the_row(recorder: WarningRecorder, row: dict[str, Any]) -> None:
    recorder.observe(bad_samples="the global batch, epoch 0: sample 3", **row)
    assert recorder.events[0]["text"].endswith("; the global batch, epoch 0: sample 3")


def test_fp16_overflow_does_not_warn(recorder: WarningRecorder) -> None:
    """The gradient norm is Inf, and the step is skipped."""
    assert recorder.observe(99, grad_norm=math.inf, skipped=1, overflow=1) == []


def test_nonfinite_row_of_a_custom_script_warns(recorder: WarningRecorder) -> None:
    recorder.warnings.observe({"step": 1, "loss": math.inf})
    recorder.warnings.observe({"step": 2, "accuracy": 0.5})
    assert [e["code"] for e in recorder.events] == ["non_finite"] and "not logged" in recorder.events[0]["text"]


def test_single_masked_step_does_not_warn(recorder: WarningRecorder) -> None:
    assert recorder.observe(loss=math.nan, grad_norm=0.0) == []


def test_consecutive_masked_steps_warn(recorder: WarningRecorder) -> None:
    masked = {"loss": math.nan, "grad_norm": 0.0}
    assert recorder.observe(MASKED_STEPS - 1, **masked) == recorder.observe() == []
    assert recorder.observe(VANISHING_STEPS, **masked) == ["nothing_counted"]


def test_nan_loss_with_gradient_is_not_a_masked_step(recorder: WarningRecorder) -> None:
    assert recorder.observe(MASKED_STEPS, loss=math.nan) == []


def test_vanishing_gradient_warns_after_consecutive_steps(recorder: WarningRecorder) -> None:
    assert recorder.observe(VANISHING_STEPS - 1, grad_norm=1e-9) == []
    assert recorder.observe(grad_norm=1e-3) == []
    assert recorder.observe(VANISHING_STEPS, grad_norm=1e-9) == ["grad_vanishing"]


def test_frequent_clipping_warns_after_enough_steps(recorder: WarningRecorder) -> None:
    assert recorder.observe(99, clip_fraction=1.0) == []
    assert recorder.observe(clip_fraction=0.51) == ["clipping_often"]
    assert recorder.events[0]["limit"] == 0.5


def test_clipping_fix_names_the_median_norm(recorder: WarningRecorder) -> None:
    recorder.observe(99, clip_fraction=1.0, grad_norm=7.5)
    assert recorder.observe(clip_fraction=1.0, grad_norm=7.5) == ["clipping_often"]
    fix = recorder.events[0]["fix"]
    assert fix.startswith("raise optim.clip_norm above 7.5,")
    assert "Lower the learning rate only if the loss also spikes" in fix


def test_throughput_drop_warns(recorder: WarningRecorder) -> None:
    assert recorder.observe(5 + MIN_BASELINE_STEPS + RECENT_STEPS, tokens_per_s=100.0, step_s=8.0) == []
    assert recorder.observe(RECENT_STEPS, tokens_per_s=91.0, step_s=9.0) == []
    assert recorder.observe(MAX_BASELINE_STEPS, tokens_per_s=100.0, step_s=8.0) == []
    assert recorder.observe(RECENT_STEPS // 2, tokens_per_s=80.0, step_s=10.0) == []
    assert recorder.observe(2, tokens_per_s=80.0, step_s=10.0) == ["throughput_drop"]
    assert recorder.events[0]["value"] == pytest.approx(0.8)


def test_throughput_falls_back_to_samples_and_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, slow in (({"samples_per_s": 9.0}, {"samples_per_s": 5.0}), ({}, {})):
        recorder = WarningRecorder(monkeypatch)
        assert recorder.observe(5 + MIN_BASELINE_STEPS + RECENT_STEPS, step_s=10.0, **fast) == []
        assert recorder.observe(RECENT_STEPS, step_s=18.0, **slow) == ["throughput_drop"]


@pytest.mark.long
def test_short_or_brief_runs_have_no_throughput_warning(recorder: WarningRecorder) -> None:
    """Cover many steps of milliseconds, and longer steps for less than a minute."""
    assert recorder.observe(5 + MIN_BASELINE_STEPS + RECENT_STEPS, step_s=0.002) == []
    assert recorder.observe(20_000, step_s=0.002) == []
    assert recorder.observe(6000, step_s=0.01) == []
    recorder.warnings = WarningReporter(StabilitySpec(), lambda name, **fields: recorder.events.append(fields))
    assert recorder.observe(200, step_s=0.2) == []
    assert recorder.observe(80, step_s=0.5) == []


@pytest.mark.long
def test_throughput_drop_of_short_steps_warns_after_a_while(recorder: WarningRecorder) -> None:
    assert recorder.observe(MAX_BASELINE_STEPS * 10, step_s=0.03) == []
    assert recorder.observe(100, step_s=0.05) == []
    assert recorder.observe(200, step_s=0.05) == ["throughput_drop"]


def test_repeated_warnings_are_suppressed_and_counted(recorder: WarningRecorder) -> None:
    assert recorder.observe(5, grad_norm=50.0) == ["grad_norm_high"]
    assert recorder.observe(spike=1) == ["loss_spike"]  # other codes are not suppressed
    recorder.now += REPEAT_INTERVAL_S
    assert recorder.observe(grad_norm=50.0) == ["grad_norm_high"]
    assert [e["suppressed"] for e in recorder.events] == [0, 0, 4]


def test_recipe_can_disable_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = WarningRecorder(
        monkeypatch,
        grad_norm_max=0.0,
        grad_norm_usual=0.0,
        grad_norm_min=0.0,
        clipped_share=0.0,
        slowdown=0.0,
        loss_trend=False,
    )
    rows = [{"grad_norm": 1e9, "clip_fraction": 1.0, "step_s": 1.0}, {"grad_norm": 0.0, "step_s": 9.0, "lr": 1.0}]
    assert [recorder.observe(300, **row) for row in rows] == [[], []]


def test_norm_that_is_always_high_warns(recorder: WarningRecorder) -> None:
    assert recorder.observe(99, grad_norm=5.5) == []
    assert recorder.observe(grad_norm=5.5) == ["grad_norm_elevated"]
    assert recorder.events[0]["value"] == 5.5 and "0.5 to 2" in recorder.events[0]["text"]


def test_frequent_clipping_includes_the_warning_about_the_norm(recorder: WarningRecorder) -> None:
    assert recorder.observe(100, grad_norm=7.5, clip_fraction=1.0) == ["clipping_often"]


def test_vanishing_layer_is_named(recorder: WarningRecorder) -> None:
    norms = {"grad_norm/embed": 8e-12, "grad_norm/layers.0": 1e-3, "grad_norm/head": 0.5, "grad_norm/frozen": 0.0}
    assert recorder.observe(**norms) == ["layer_vanishing"]
    assert "the gradient norm of embed is 8e-12" in recorder.events[0]["text"]


def test_layer_with_gradients_of_zero_is_named_unless_it_is_frozen(recorder: WarningRecorder) -> None:
    row = {"grad_norm/embed": 0.0, "update_ratio/embed": 1e-5, "grad_norm/head": 0.5, "update_ratio/head": 1e-3}
    assert recorder.observe(**{**row, "update_ratio/embed": 0.0}) == []
    assert recorder.observe(**row) == ["layer_vanishing"]
    assert "the gradient norm of embed is 0, " in recorder.events[0]["text"]


def test_layers_of_similar_norms_do_not_warn(recorder: WarningRecorder) -> None:
    assert recorder.observe(**{"grad_norm/embed": 1e-3, "grad_norm/head": 0.5, "grad_norm/bad": math.nan}) == []


def test_flat_loss_warns_with_a_fix_for_a_low_rate(recorder: WarningRecorder) -> None:
    assert recorder.observe(150, loss=5.57, lr=1e-9) == ["loss_flat"]
    assert recorder.events[0]["fix"].startswith("raise the learning rate")

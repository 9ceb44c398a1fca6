"""Training progress per time and energy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.run import attempts
from clustertrain.telemetry.analysis.efficiency import Energy, summarize_training
from clustertrain.telemetry.report_schema import GpuSummary, Timeline, TrainingSummary
from tests.unit.run.histories import History

TOKENS = 1000
FLOPS = 6e12  # per step


def gpu(name: str | None = "NVIDIA H100 80GB HBM3", parent: str | None = None) -> GpuSummary:
    empty: dict[str, Any] = dict.fromkeys(
        ("index", "utilization", "memory_used_gib", "memory_total_gib", "power_w", "energy_j", "energy_source",
         "temperature_c", "sm_clock_mhz", "memory_clock_mhz")
    )  # fmt: skip
    return GpuSummary(
        node="n1", uuid="GPU-0", name=name, ranks=[0], attempts=[1], samples=0, samples_expected=0,
        missing={}, parent=parent,
        timeline=Timeline(1.0, []), **empty,
    )  # fmt: skip


def plan(history: History, *, tokens: int = TOKENS, flops: float | None = FLOPS, ranks: int = 2) -> None:
    batch = {"global_batch": 10, "micro_batch": 5, "grad_accum": 1, "tokens_per_step": tokens}
    fsio.write_json(
        history.run.plan,
        {"device": "cuda", "world_size": ranks, "batch": batch, "time": {"flops_per_step": flops}},
    )


def train(history: History, n: int, first: int, last: int, seconds: float, *, ranks: int = 2, **row: Any) -> None:
    attempt_log = history.attempt(n, 100.0 * n)
    attempt_log.t = 100.0 * n
    attempt_log.event("session_started", world_size=ranks)
    for step in range(first, last + 1):
        attempt_log.step(step, seconds, tokens=TOKENS, **{"tokens_per_s": TOKENS / seconds, "loss": 1.0 / step, **row})
    attempt_log.write()


def summarize(history: History, energy_j: float | None = None, *gpus: GpuSummary) -> TrainingSummary:
    summary = summarize_training(history.run, attempts.load_attempts(history.run), Energy(energy_j), gpus)
    assert summary is not None
    return summary


def test_repeated_step_counts_once_but_costs_energy(tmp_path: Path) -> None:
    history = History(tmp_path)
    plan(history)
    train(history, 1, 1, 20, 1.0)
    train(history, 2, 11, 30, 0.5)
    summary = summarize(history, 60_000.0, gpu(), gpu())
    assert summary.steps == 30 and summary.tokens == pytest.approx(30 * TOKENS)
    assert summary.joules_per_token == pytest.approx(2.0)
    assert summary.loss == pytest.approx(1 / 30)
    # Steps 6 to 10 of the first attempt and 16 to 30 of the second: each without five warm-up steps.
    assert summary.tokens_per_s == pytest.approx(20 * TOKENS / (5 * 1.0 + 15 * 0.5))
    assert summary.step_s is not None and (summary.step_s.p50, summary.step_s.max) == pytest.approx((0.5, 1.0))
    assert summary.samples == 300


def test_mfu_uses_plan_flops_and_data_sheet_rate(tmp_path: Path) -> None:
    history = History(tmp_path)
    plan(history)
    train(history, 1, 1, 20, 0.1)
    summary = summarize(history, None, gpu(), gpu())
    assert summary.tokens_per_s_per_gpu == pytest.approx(TOKENS / 0.1 / 2)
    assert summary.mfu == pytest.approx(FLOPS / 0.1 / 2 / 989.4e12, rel=0.001)
    assert summary.energy_j is None and summary.joules_per_token is None


@pytest.mark.parametrize(
    ("gpus", "flops"),
    [([], FLOPS), ([gpu("Some Card 9000")], FLOPS), ([gpu(), gpu(None)], FLOPS), ([gpu(parent="GPU-1")], FLOPS),
     ([gpu()], None)],
    ids=["no-gpu", "unknown-gpu", "one-unnamed-gpu", "mig-slice", "unknown-flops"],
)  # fmt: skip
def test_no_mfu_without_known_gpus_or_flops(tmp_path: Path, gpus: list[GpuSummary], flops: float | None) -> None:
    history = History(tmp_path)
    plan(history, flops=flops)
    train(history, 1, 1, 20, 0.1)
    summary = summarize(history, None, *gpus)
    assert summary.mfu is None and summary.tokens_per_s == pytest.approx(TOKENS / 0.1)
    assert (summary.tokens_per_s_per_gpu is None) == (not gpus)


def test_attempts_are_weighted_by_ranks(tmp_path: Path) -> None:
    history = History(tmp_path)
    plan(history, ranks=4)
    train(history, 1, 1, 15, 1.0, ranks=4)
    train(history, 2, 16, 30, 2.0, ranks=2)
    summary = summarize(history, None, gpu())
    assert summary.tokens_per_s_per_gpu == pytest.approx(20 * TOKENS / (10 * 1.0 * 4 + 10 * 2.0 * 2))


def test_images_have_samples_but_no_tokens(tmp_path: Path) -> None:
    history = History(tmp_path)
    plan(history, tokens=0, flops=None)
    train(history, 1, 1, 3, 0.5, tokens_per_s=None)
    summary = summarize(history, 500.0, gpu())
    assert summary.tokens is None and summary.tokens_per_s is None and summary.joules_per_token is None
    assert summary.samples == 30 and summary.samples_per_s == pytest.approx(10 / 0.5)


def test_data_wait_is_share_of_steps(tmp_path: Path) -> None:
    history = History(tmp_path)
    plan(history)
    attempt_log = history.attempt(1, 0.0)
    for step in range(1, 11):
        attempt_log.step(step, 2.0, wait_s=0.5)
    attempt_log.write()
    assert summarize(history).data_wait_share == pytest.approx(0.25)


def test_nonfinite_loss_is_none(tmp_path: Path) -> None:
    history = History(tmp_path)
    train(history, 1, 1, 3, 0.5, loss=float("nan"))
    summary = summarize(history)
    assert summary.loss is None and summary.steps == 3 and summary.samples is None


def test_run_without_steps_has_no_summary(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.attempt(1, 1.0).write()
    assert summarize_training(history.run, attempts.load_attempts(history.run), 5.0, []) is None

"""Predicted and measured values: numbers, text and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from clustertrain import fsio
from clustertrain.cli.jobs import status
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.data import DataSpec
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.durations import format_step_time
from clustertrain.plan.planner import plan
from clustertrain.report import plan_vs_measured
from clustertrain.report.plan_vs_measured import Pair, PlanAccuracy
from clustertrain.report.status import plan_accuracy_table
from clustertrain.report.terminal import ASCII, UNICODE, Glyphs, emit, make_console
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage.measured_speed import WARM_UP_STEPS
from tests.unit.telemetry.runs import busy, gpu, new_attempt, record

RANKS = 8
TOKENS = 64 * 2048


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = run_dir.create_run("gpt")
    run.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
    return run


def write_plan(run: RunDir, device: str = "cuda") -> dict[str, Any]:
    """Write the plan of a decoder on one node of H100s and return its JSON."""
    recipe = Recipe(
        model=ModelSpec(dim=2048, layers=24, heads=16, kv_heads=8, vocab_size=32000),
        data=DataSpec(seq_len=2048),
        train=TrainSpec(global_batch=64),
    )
    gpu_type = "h100" if device == "cuda" else ""
    job = JobSpec(gpus=RANKS, gpu_type=gpu_type, layout="fsdp")
    document: dict[str, Any] = msgspec.to_builtins(plan(RunSpec(job=job, recipe=recipe), ClusterProfile(), device))
    fsio.write_json(run.plan, document)
    return document


def write_attempt(run: RunDir, n: int, step_s: float, *, steps: int = 20, world_size: int = RANKS) -> None:
    attempt = new_attempt(run, n)
    log = fsio.JsonlAppender(attempt.events_path("rank-0"))
    log.append({"t": 1.0, "event": "session_started", "world_size": world_size}, {"t": 2.0, "event": "first_step"})
    log.close()
    slow = [60.0] * WARM_UP_STEPS
    rows = fsio.JsonlAppender(run.metrics_path(n))
    rows.append(
        *(
            {"step": i, "t": 2.0 + i, "step_s": s, "tokens_per_s": TOKENS / s, "peak_allocated_gib": 31.0}
            for i, s in enumerate([*slow, *[step_s] * steps], 1)
        )
    )
    rows.close()


def render_text(accuracy: PlanAccuracy, width: int = 80, glyphs: Glyphs = UNICODE) -> str:
    out = io.StringIO()
    emit(make_console(out, width), *plan_accuracy_table(accuracy, glyphs))
    return out.getvalue()


def test_gpu_run_has_predictions_and_measurements(run: RunDir) -> None:
    planned = write_plan(run)
    write_attempt(run, 1, 2.0)
    record(run.attempt(1), [(gpu(0), busy(used_gib=40.0))])
    accuracy = plan_vs_measured.compare_run(run)
    assert accuracy.step_s == Pair(planned["time"]["step_s"], 2.0) and accuracy.step_s.predicted
    assert accuracy.tokens_per_s_per_gpu == Pair(planned["time"]["tokens_per_s_per_gpu"], TOKENS / 2.0 / RANKS)
    assert accuracy.peak_gib == Pair(planned["memory"]["peak_gib"], 40.0)
    allocated_gib = planned["memory"]["peak_gib"] - planned["memory"]["overhead_gib"]
    assert accuracy.allocated_gib == Pair(allocated_gib, 31.0) and allocated_gib > 0
    assert (accuracy.steps, accuracy.attempts, accuracy.other_attempts) == (20, (1,), ())
    assert accuracy.step_s.ratio == pytest.approx(2.0 / planned["time"]["step_s"])


def test_cpu_run_has_no_predictions_and_no_memory(run: RunDir) -> None:
    write_plan(run, "cpu")
    write_attempt(run, 1, 2.0)
    accuracy = plan_vs_measured.compare_run(run)
    assert accuracy.step_s == Pair(None, 2.0) and accuracy.step_s.ratio is None
    assert accuracy.peak_gib == accuracy.allocated_gib == Pair(None, None)


def test_attempts_on_fewer_ranks_do_not_count(run: RunDir) -> None:
    write_plan(run)
    write_attempt(run, 1, 2.0)
    write_attempt(run, 2, 7.0, world_size=6, steps=100)
    accuracy = plan_vs_measured.compare_run(run)
    assert (accuracy.step_s.measured, accuracy.attempts, accuracy.other_attempts) == (2.0, (1,), (2,))
    assert "not counted: attempt 2, whose number of ranks is not the plan's" in render_text(accuracy)


@pytest.mark.parametrize(
    "plan_json", [None, "{}", "{", '{"world_size": "many"}'], ids=["missing", "empty", "truncated", "wrong-type"]
)
def test_unreadable_plan_gives_an_empty_comparison(run: RunDir, plan_json: str | None) -> None:
    if plan_json is not None:
        run.plan.write_text(plan_json)
    write_attempt(run, 1, 2.0)
    assert plan_vs_measured.compare_run(run) == PlanAccuracy()
    assert plan_accuracy_table(PlanAccuracy(), UNICODE) == []


def test_table_without_predictions_has_no_empty_columns() -> None:
    text = render_text(PlanAccuracy(step_s=Pair(None, 0.4532), steps=115), 80)
    assert text.splitlines()[1].split() == ["measured"] and "step" in text and "–" not in text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_table_layout(width: int) -> None:
    accuracy = PlanAccuracy(
        step_s=Pair(0.412, 0.4532),
        tokens_per_s_per_gpu=Pair(39_768.9, 36_153.6),
        peak_gib=Pair(61.24, None),
        allocated_gib=Pair(None, 55.0),
        steps=115,
    )
    text = render_text(accuracy, width)
    assert text.splitlines() == [
        "Plan and run (median of 115 steps)",
        "                   predicted  measured  ratio",
        "step                  412 ms    453 ms   1.10",
        "tokens/s per rank     39,769    36,154   0.91",
        "GPU memory in use   61.2 GiB         –      –",
        "torch allocations          –  55.0 GiB      –",
    ]
    assert "–" not in render_text(accuracy, width, ASCII)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00043, "0.43 ms"),
        (0.0421, "42.1 ms"),
        (0.412, "412 ms"),
        (4.123, "4.12 s"),
        (61.23, "61.2 s"),
        (1440, "1440 s"),
    ],
)
def test_format_step_time(seconds: float, text: str) -> None:
    assert format_step_time(seconds) == text


def test_status_shows_predictions_as_text_and_json(run: RunDir) -> None:
    planned = write_plan(run)
    prediction = json.loads(CliRunner().invoke(status, [run.id, "--json"]).stdout)["prediction"]
    assert prediction["step_s"] == {"predicted": pytest.approx(planned["time"]["step_s"]), "measured": None}
    write_attempt(run, 1, 2.0)
    answer = json.loads(CliRunner().invoke(status, [run.id, "--json"]).stdout)
    assert answer["prediction"]["step_s"] == {"predicted": pytest.approx(planned["time"]["step_s"]), "measured": 2.0}
    assert set(answer["prediction"]) >= {"step_s", "tokens_per_s_per_gpu", "peak_gib"}
    text = CliRunner().invoke(status, [run.id]).stdout
    assert "Plan and run (median of 20 steps)" in text and "2.00 s" in text

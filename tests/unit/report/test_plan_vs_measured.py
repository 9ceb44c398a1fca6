"""What was predicted beside what was measured: the numbers, the text and the JSON."""

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
from clustertrain.plan.planner import plan
from clustertrain.report import plan_vs_measured
from clustertrain.report.plan_vs_measured import Pair, PlanAccuracy
from clustertrain.report.status import plan_accuracy_table
from clustertrain.report.terminal import ASCII, UNICODE, Glyphs, emit, format_step_time, make_console
from clustertrain.run import run_dir
from clustertrain.run.measured_speed import WARM_UP_STEPS
from clustertrain.run.run_dir import RunDir
from tests.unit.telemetry.runs import busy, gpu, new_attempt, record

RANKS = 8
TOKENS = 64 * 2048


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    made = run_dir.create_run("gpt")
    made.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
    return made


def planned(run: RunDir, device: str = "cuda") -> dict[str, Any]:
    """Writes the plan of a decoder on one node of H100s; returns its JSON."""
    recipe = Recipe(
        model=ModelSpec(dim=2048, layers=24, heads=16, kv_heads=8, vocab_size=32000),
        data=DataSpec(seq_len=2048),
        train=TrainSpec(global_batch=64),
    )
    gpu_type = "h100" if device == "cuda" else ""
    job = JobSpec(gpus=RANKS, gpu_type=gpu_type, layout="fsdp")
    made: dict[str, Any] = msgspec.to_builtins(plan(RunSpec(job=job, recipe=recipe), ClusterProfile(), device))
    fsio.write_json(run.plan, made)
    return made


def trained(run: RunDir, n: int, step_s: float, *, steps: int = 20, world_size: int = RANKS) -> None:
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


def shown(found: PlanAccuracy, width: int = 80, signs: Glyphs = UNICODE) -> str:
    out = io.StringIO()
    emit(make_console(out, width), *plan_accuracy_table(found, signs))
    return out.getvalue()


def test_a_gpu_run_has_both_sides_of_every_row(run: RunDir) -> None:
    asked = planned(run)
    trained(run, 1, 2.0)
    record(run.attempt(1), [(gpu(0), busy(used_gib=40.0))])
    found = plan_vs_measured.compare_run(run)
    assert found.step_s == Pair(asked["time"]["step_s"], 2.0) and found.step_s.predicted
    assert found.tokens_per_s_per_gpu == Pair(asked["time"]["tokens_per_s_per_gpu"], TOKENS / 2.0 / RANKS)
    assert found.peak_gib == Pair(asked["memory"]["peak_gib"], 40.0)
    in_allocator = asked["memory"]["peak_gib"] - asked["memory"]["overhead_gib"]
    assert found.allocated_gib == Pair(in_allocator, 31.0) and in_allocator > 0
    assert (found.steps, found.attempts, found.other_attempts) == (20, (1,), ())
    assert found.step_s.ratio == pytest.approx(2.0 / asked["time"]["step_s"])


def test_on_cpus_nothing_was_predicted_and_memory_is_not_compared(run: RunDir) -> None:
    planned(run, "cpu")
    trained(run, 1, 2.0)
    found = plan_vs_measured.compare_run(run)
    assert found.step_s == Pair(None, 2.0) and found.step_s.ratio is None
    assert found.peak_gib == found.allocated_gib == Pair(None, None)


def test_attempts_on_fewer_ranks_do_not_count(run: RunDir) -> None:
    planned(run)
    trained(run, 1, 2.0)
    trained(run, 2, 7.0, world_size=6, steps=100)
    found = plan_vs_measured.compare_run(run)
    assert (found.step_s.measured, found.attempts, found.other_attempts) == (2.0, (1,), (2,))
    assert "not counted: attempt 2, on another number of ranks than the plan's" in shown(found)


@pytest.mark.parametrize("plan_json", [None, "{}", "{", '{"world_size": "many"}'])
def test_without_a_plan_that_reads_there_is_nothing_to_say(run: RunDir, plan_json: str | None) -> None:
    if plan_json is not None:
        run.plan.write_text(plan_json)
    trained(run, 1, 2.0)
    assert plan_vs_measured.compare_run(run) == PlanAccuracy()
    assert plan_accuracy_table(PlanAccuracy(), UNICODE) == []


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_table(width: int) -> None:
    found = PlanAccuracy(
        step_s=Pair(0.412, 0.4532),
        tokens_per_s_per_gpu=Pair(39_768.9, 36_153.6),
        peak_gib=Pair(61.24, None),
        allocated_gib=Pair(None, 55.0),
        steps=115,
    )
    text = shown(found, width)
    assert text.splitlines() == [
        "The plan and the run (median of 115 steps)",
        "                   predicted  measured  ratio",
        "step                  412 ms    453 ms   1.10",
        "tokens/s a rank       39,769    36,154   0.91",
        "GPU memory in use   61.2 GiB         –      –",
        "of it by torch             –  55.0 GiB      –",
    ]
    assert "–" not in shown(found, width, ASCII)


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
def test_the_time_of_a_step(seconds: float, text: str) -> None:
    assert format_step_time(seconds) == text


def test_status_has_it_as_text_and_as_json(run: RunDir) -> None:
    asked = planned(run)
    waiting = json.loads(CliRunner().invoke(status, [run.id, "--json"]).stdout)["prediction"]
    assert waiting["step_s"] == {"predicted": asked["time"]["step_s"], "measured": None}
    trained(run, 1, 2.0)
    answer = json.loads(CliRunner().invoke(status, [run.id, "--json"]).stdout)
    assert answer["prediction"]["step_s"] == {"predicted": asked["time"]["step_s"], "measured": 2.0}
    assert set(answer["prediction"]) >= {"step_s", "tokens_per_s_per_gpu", "peak_gib"}
    text = CliRunner().invoke(status, [run.id]).stdout
    assert "The plan and the run (median of 20 steps)" in text and "2.00 s" in text

"""The speed and peak memory of a run, from rows and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.usage import measured_speed
from clustertrain.run.usage.measured_speed import WARM_UP_STEPS, MeasuredSpeed


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def write_attempt(
    run: RunDir, n: int, *rows: dict[str, Any], world_size: int = 8, first_step: bool = True
) -> AttemptDir:
    attempt = run.attempt(n)
    log = fsio.JsonlAppender(attempt.events_path("rank-0"))
    log.append({"t": float(n), "event": "session_started", "world_size": world_size})
    if first_step:
        log.append({"t": n + 0.5, "event": "first_step", "step": 1})
    log.close()
    scalars = fsio.JsonlAppender(run.metrics_path(n))
    scalars.append(*({"step": i, "t": 0.0, **row} for i, row in enumerate(rows, 1)))
    scalars.close()
    return attempt


def make_rows(*step_s: float) -> list[dict[str, float]]:
    return [{"step_s": s, "tokens_per_s": 800 / s} for s in step_s]


def write_results(attempt: AttemptDir, node: str, *peaks: float | None) -> None:
    ranks = [{"rank": i, "peak_allocated_gib": p} for i, p in enumerate(peaks)]
    attempt.results.mkdir(exist_ok=True)
    fsio.write_json(attempt.result_path(node), {"node": node, "ranks": ranks})


def test_speed_is_the_median_step_without_warm_up(run: RunDir) -> None:
    warm_up = make_rows(*[60.0] * WARM_UP_STEPS)
    attempts = [
        write_attempt(run, 1, *warm_up, *make_rows(2.0, 2.0, 30.0)),  # something else ran during the last step
        write_attempt(run, 2, *warm_up, *make_rows(2.0, 2.5)),
    ]
    assert measured_speed.measure_speed(run, attempts) == MeasuredSpeed(steps=5, step_s=2.0, tokens_per_s=400.0)


def test_warm_up_steps_measure_nothing(run: RunDir) -> None:
    attempts = [write_attempt(run, 1, *make_rows(*[60.0] * WARM_UP_STEPS)), write_attempt(run, 2)]
    assert measured_speed.measure_speed(run, attempts) == MeasuredSpeed()


def test_speed_without_a_numeric_token_rate(run: RunDir) -> None:
    rows: list[dict[str, Any]] = [{"step_s": 1.0, "tokens_per_s": "many"}] * (WARM_UP_STEPS + 1)
    assert measured_speed.measure_speed(run, [write_attempt(run, 1, *rows)]) == MeasuredSpeed(steps=1, step_s=1.0)


def test_attempts_are_split_by_world_size(run: RunDir) -> None:
    for n, world_size in ((1, 8), (2, 6), (3, 8)):
        write_attempt(run, n, world_size=world_size)
    write_attempt(run, 4, first_step=False)  # has no first step yet
    same, others = measured_speed.split_by_world_size(run, 8)
    assert ([a.n for a in same], [a.n for a in others]) == ([1, 3], [2])


def test_peak_memory_is_the_maximum_over_ranks(run: RunDir) -> None:
    attempt = write_attempt(run, 1, {"peak_allocated_gib": 10.0}, {"peak_allocated_gib": 12.0})
    assert measured_speed.find_peak_allocated_gib(run, [attempt]) == 12.0  # rank 0's peak, while it trains
    write_results(attempt, "a", 12.5, None)
    write_results(attempt, "b", 11.0, 14.0)
    assert measured_speed.find_peak_allocated_gib(run, [attempt]) == 14.0


def test_peak_memory_is_from_the_newest_attempt_that_has_one(run: RunDir) -> None:
    attempts = [write_attempt(run, 1, {"peak_allocated_gib": 10.0}), write_attempt(run, 2, {"peak_allocated_gib": 9.0})]
    assert measured_speed.find_peak_allocated_gib(run, attempts) == 9.0
    assert measured_speed.find_peak_allocated_gib(run, [*attempts, write_attempt(run, 3)]) == 9.0
    on_cpu = write_attempt(run, 4)
    write_results(on_cpu, "a", None, None)
    assert measured_speed.find_peak_allocated_gib(run, [on_cpu]) is None

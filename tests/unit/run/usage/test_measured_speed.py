"""What a run has measured of itself, from rows and results that a test wrote."""

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


def attempt(run: RunDir, n: int, *rows: dict[str, Any], world_size: int = 8, first_step: bool = True) -> AttemptDir:
    made = run.attempt(n)
    log = fsio.JsonlAppender(made.events_path("rank-0"))
    log.append({"t": float(n), "event": "session_started", "world_size": world_size})
    if first_step:
        log.append({"t": n + 0.5, "event": "first_step", "step": 1})
    log.close()
    scalars = fsio.JsonlAppender(run.metrics_path(n))
    scalars.append(*({"step": i, "t": 0.0, **row} for i, row in enumerate(rows, 1)))
    scalars.close()
    return made


def steps(*step_s: float) -> list[dict[str, float]]:
    return [{"step_s": s, "tokens_per_s": 800 / s} for s in step_s]


def ended(made: AttemptDir, node: str, *peaks: float | None) -> None:
    ranks = [{"rank": i, "peak_allocated_gib": p} for i, p in enumerate(peaks)]
    made.results.mkdir(exist_ok=True)
    fsio.write_json(made.result_path(node), {"node": node, "ranks": ranks})


def test_the_median_step_without_the_first_ones_of_each_attempt(run: RunDir) -> None:
    warm_up = steps(*[60.0] * WARM_UP_STEPS)
    made = [
        attempt(run, 1, *warm_up, *steps(2.0, 2.0, 30.0)),  # beside the last one something else went on
        attempt(run, 2, *warm_up, *steps(2.0, 2.5)),
    ]
    assert measured_speed.measure_speed(run, made) == MeasuredSpeed(steps=5, step_s=2.0, tokens_per_s=400.0)


def test_nothing_is_measured_while_an_attempt_warms_up(run: RunDir) -> None:
    made = [attempt(run, 1, *steps(*[60.0] * WARM_UP_STEPS)), attempt(run, 2)]
    assert measured_speed.measure_speed(run, made) == MeasuredSpeed()


def test_a_step_without_tokens_and_a_script_that_logs_words(run: RunDir) -> None:
    rows: list[dict[str, Any]] = [{"step_s": 1.0, "tokens_per_s": "many"}] * (WARM_UP_STEPS + 1)
    assert measured_speed.measure_speed(run, [attempt(run, 1, *rows)]) == MeasuredSpeed(steps=1, step_s=1.0)


def test_attempts_on_another_number_of_ranks_stand_apart(run: RunDir) -> None:
    for n, world_size in ((1, 8), (2, 6), (3, 8)):
        attempt(run, n, world_size=world_size)
    attempt(run, 4, first_step=False)  # has come to nothing yet
    alike, others = measured_speed.split_by_world_size(run, 8)
    assert ([a.n for a in alike], [a.n for a in others]) == ([1, 3], [2])


def test_the_peak_is_that_of_the_rank_that_needed_most(run: RunDir) -> None:
    made = attempt(run, 1, {"peak_allocated_gib": 10.0}, {"peak_allocated_gib": 12.0})
    assert measured_speed.find_peak_allocated_gib(run, [made]) == 12.0  # of rank 0, while it trains
    ended(made, "a", 12.5, None)
    ended(made, "b", 11.0, 14.0)
    assert measured_speed.find_peak_allocated_gib(run, [made]) == 14.0


def test_the_peak_is_that_of_the_newest_attempt_that_tells_it(run: RunDir) -> None:
    made = [attempt(run, 1, {"peak_allocated_gib": 10.0}), attempt(run, 2, {"peak_allocated_gib": 9.0})]
    assert measured_speed.find_peak_allocated_gib(run, made) == 9.0
    assert measured_speed.find_peak_allocated_gib(run, [*made, attempt(run, 3)]) == 9.0
    on_cpu = attempt(run, 4)
    ended(on_cpu, "a", None, None)
    assert measured_speed.find_peak_allocated_gib(run, [on_cpu]) is None

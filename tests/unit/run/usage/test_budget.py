"""The cost of a run over its attempts, and its status under the contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.config.contract import ContractSpec
from clustertrain.config.recipe import Recipe
from clustertrain.run import attempts
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage import budget, contract_status
from clustertrain.run.usage.budget import BudgetUsage

HOUR = 3600.0


def write_attempt(
    run: RunDir, n: int, start: float, end: float | None, ranks: int | None, last_row: float | None = None
) -> None:
    """Write an attempt. Without an ``end`` it was killed, and ``last_row`` is the time of its last row."""
    folder = run.attempt(n).events
    folder.mkdir(parents=True)
    lines = [{"t": start, "event": "started"}]
    if ranks:
        lines.append({"t": start, "event": "session_started", "world_size": ranks})
    if end is not None:
        lines.append({"t": end, "event": "ended", "ending": "preempted"})
    for line in lines:
        with (folder / "batch.jsonl").open("a") as f:
            f.write(format_line(line))
    if last_row is not None:
        run.metrics.mkdir(exist_ok=True)
        run.metrics_path(n).write_text(format_line({"step": 1, "t": last_row}))


def format_line(value: dict[str, object]) -> str:
    return json.dumps({"monotonic_s": 0.0, "host": "h", "pid": 1, **value}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    fsio.write_json(run.plan, {"world_size": 4})
    return run


def compute_usage(run: RunDir, now: float | None = None) -> BudgetUsage:
    return budget.compute_usage(run, attempts.load_attempts(run), now, 2.0)


def test_usage_counts_the_ranks_of_each_attempt_but_no_queue(run: RunDir) -> None:
    write_attempt(run, 1, 0.0, HOUR, 4)
    write_attempt(run, 2, 10 * HOUR, 12 * HOUR, 8)
    assert compute_usage(run) == BudgetUsage(gpu_hours=20.0, wall_hours=3.0, cost=40.0)


def test_killed_attempt_costs_until_last_row_running_one_until_now(run: RunDir) -> None:
    write_attempt(run, 1, 0.0, None, None, last_row=2 * HOUR)
    write_attempt(run, 2, 5 * HOUR, None, 2)
    assert compute_usage(run, now=6 * HOUR) == BudgetUsage(gpu_hours=4 * 2 + 2 * 1, wall_hours=3.0, cost=20.0)
    write_attempt(run, 3, 7 * HOUR, 8 * HOUR, 2)
    assert (
        compute_usage(run, now=20 * HOUR).gpu_hours == 8 + 2
    )  # the last one has ended, so the time of the call does not matter
    assert compute_usage(run).wall_hours == 3.0  # of attempt 2 only the start is known


def test_limits_raised_in_the_spec_count(run: RunDir) -> None:
    recipe = Recipe(contract=ContractSpec(gpu_hours=10.0))
    fsio.write_json(run.record, {"contract": contract_status.build_record(recipe)})
    run.spec.write_text("[recipe.contract]\ngpu_hours = 25.0\n")
    status = contract_status.load_contract_status(run, [], None)
    assert status is not None and status.remaining == {"gpu_hours": 25.0} and status.metric == "loss"


def test_format_spent_names_the_limits_that_were_reached() -> None:
    contract = ContractSpec(gpu_hours=10.0, wall_hours=1.0, cost=100.0, gpu_hour_cost=2.0)
    assert budget.format_spent(contract, BudgetUsage(gpu_hours=9.9, wall_hours=0.9, cost=19.8)) == ""
    assert budget.format_spent(contract, BudgetUsage(gpu_hours=10.0, wall_hours=1.5, cost=20.0)) == (
        "the budget is spent: 10 of gpu_hours = 10, 1.5 of wall_hours = 1"
    )
    assert budget.remaining(contract, BudgetUsage(gpu_hours=4.0, wall_hours=2.0)) == {
        "gpu_hours": 6.0,
        "wall_hours": 0.0,
        "cost": 100.0,
    }
    assert budget.format_spent(ContractSpec(), BudgetUsage(gpu_hours=1e9)) == ""


def test_contract_status_before_and_after_an_evaluation(run: RunDir) -> None:
    recipe = Recipe(contract=ContractSpec(task="classify cats and dogs", target="research", gpu_hours=10.0))
    assert contract_status.load_contract_status(run, [], None) is None
    fsio.write_json(run.record, {"contract": contract_status.build_record(recipe)})
    before = contract_status.load_contract_status(run, [], None)
    assert before is not None and (before.task, before.metric, before.best) == ("classify cats and dogs", "loss", None)
    write_attempt(run, 1, 0.0, HOUR, 4)
    log = EventLog(run.attempt(1).events_path("rank-0"))
    slices = {"night": {"value": 0.5, "best": 0.75}, "day": {"value": 0.9, "best": 0.9}}
    fields = {"metric": "validation_accuracy", "higher_is_better": True, "value": 0.6, "best": 0.7, "best_step": 20}
    log.write("evaluated", step=30, slices=slices, **fields)
    log.close()
    status = contract_status.load_contract_status(run, attempts.load_attempts(run), None)
    assert status is not None and (status.value, status.step, status.best, status.best_step) == (0.6, 30, 0.7, 20)
    assert {name: s.regression for name, s in status.slices.items()} == {"night": 0.25, "day": 0.0}
    assert status.used is not None and status.used.gpu_hours == 4.0 and status.remaining == {"gpu_hours": 6.0}


@pytest.mark.parametrize("name", ["rolled_back", "restored", "first_step"])
def test_evaluation_of_a_discarded_step_does_not_count(run: RunDir, name: str) -> None:
    fsio.write_json(run.record, {"contract": contract_status.build_record(Recipe())})
    log = EventLog(run.attempt(1).events_path("rank-0"))

    def best_value() -> float | None:
        status = contract_status.load_contract_status(run, [], None)
        assert status is not None and (status.value is None) == (status.step is None)
        return status.value

    log.write("evaluated", step=4, value=2.0)
    log.write("evaluated", step=8, value=1.0)
    assert best_value() == 1.0
    if name == "restored":
        log.close()
        log = EventLog(run.attempt(2).events_path("rank-0"))
        log.write("restored", step=4)
    elif name == "first_step":  # no checkpoint was found, so none was restored
        log.close()
        log = EventLog(run.attempt(2).events_path("rank-0"))
        log.write("first_step", step=1)
        assert best_value() is None
        log.write("evaluated", step=4, value=2.0)
    else:
        log.write("rolled_back", step=9, to_step=4)
    assert best_value() == 2.0
    log.write("evaluated", step=8, value=3.0)
    assert best_value() == 3.0
    log.write("rolled_back", step=9, to_step=2)
    assert best_value() is None
    log.close()


def test_evaluation_logged_before_the_first_step_event_counts(run: RunDir) -> None:
    fsio.write_json(run.record, {"contract": contract_status.build_record(Recipe())})
    log = EventLog(run.attempt(1).events_path("rank-0"))
    log.write("evaluated", step=1, value=2.0)
    log.write("first_step", step=1)
    log.close()
    status = contract_status.load_contract_status(run, [], None)
    assert status is not None and status.value == 2.0

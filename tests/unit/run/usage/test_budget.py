"""What a run has cost, over its attempts, and how it stands to its contract."""

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


def attempt(run: RunDir, n: int, start: float, end: float | None, ranks: int | None, sign: float | None = None) -> None:
    """One that ran so long on so many ranks; without an ``end`` it was killed, and ``sign`` is its last row."""
    folder = run.attempt(n).events
    folder.mkdir(parents=True)
    lines = [{"t": start, "event": "started"}]
    if ranks:
        lines.append({"t": start, "event": "session_started", "world_size": ranks})
    if end is not None:
        lines.append({"t": end, "event": "ended", "ending": "preempted"})
    for line in lines:
        with (folder / "batch.jsonl").open("a") as f:
            f.write(line_of(line))
    if sign is not None:
        run.metrics.mkdir(exist_ok=True)
        run.metrics_path(n).write_text(line_of({"step": 1, "t": sign}))


def line_of(value: dict[str, object]) -> str:
    return json.dumps({"monotonic_s": 0.0, "host": "h", "pid": 1, **value}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.path.mkdir()
    fsio.write_json(found.plan, {"world_size": 4})
    return found


def used(run: RunDir, now: float | None = None) -> BudgetUsage:
    return budget.compute_usage(run, attempts.load_attempts(run), now, 2.0)


def test_each_attempt_costs_its_own_ranks_and_the_queue_costs_nothing(run: RunDir) -> None:
    attempt(run, 1, 0.0, HOUR, 4)
    attempt(run, 2, 10 * HOUR, 12 * HOUR, 8)
    assert used(run) == BudgetUsage(gpu_hours=20.0, wall_hours=3.0, cost=40.0)


def test_one_that_was_killed_costs_until_its_last_sign_and_one_that_runs_until_now(run: RunDir) -> None:
    attempt(run, 1, 0.0, None, None, sign=2 * HOUR)
    attempt(run, 2, 5 * HOUR, None, 2)
    assert used(run, now=6 * HOUR) == BudgetUsage(gpu_hours=4 * 2 + 2 * 1, wall_hours=3.0, cost=20.0)
    attempt(run, 3, 7 * HOUR, 8 * HOUR, 2)
    assert used(run, now=20 * HOUR).gpu_hours == 8 + 2  # the last one has ended, whoever asks and when
    assert used(run).wall_hours == 3.0  # nothing is known of the second but its start


def test_limits_that_the_owner_has_raised_since(run: RunDir) -> None:
    recipe = Recipe(contract=ContractSpec(gpu_hours=10.0))
    fsio.write_json(run.record, {"contract": contract_status.build_record(recipe)})
    run.spec.write_text("[recipe.contract]\ngpu_hours = 25.0\n")
    found = contract_status.load_contract_status(run, [], None)
    assert found is not None and found.remaining == {"gpu_hours": 25.0} and found.metric == "loss"


def test_what_is_reached_is_told_in_words() -> None:
    asked = ContractSpec(gpu_hours=10.0, wall_hours=1.0, cost=100.0, gpu_hour_cost=2.0)
    assert budget.format_spent(asked, BudgetUsage(gpu_hours=9.9, wall_hours=0.9, cost=19.8)) == ""
    assert budget.format_spent(asked, BudgetUsage(gpu_hours=10.0, wall_hours=1.5, cost=20.0)) == (
        "the budget is spent: 10 of gpu_hours = 10, 1.5 of wall_hours = 1"
    )
    assert budget.remaining(asked, BudgetUsage(gpu_hours=4.0, wall_hours=2.0)) == {
        "gpu_hours": 6.0,
        "wall_hours": 0.0,
        "cost": 100.0,
    }
    assert budget.format_spent(ContractSpec(), BudgetUsage(gpu_hours=1e9)) == ""


def test_the_standing_of_a_run(run: RunDir) -> None:
    recipe = Recipe(contract=ContractSpec(task="tell cats from dogs", target="research", gpu_hours=10.0))
    assert contract_status.load_contract_status(run, [], None) is None
    fsio.write_json(run.record, {"contract": contract_status.build_record(recipe)})
    before = contract_status.load_contract_status(run, [], None)
    assert before is not None and (before.task, before.metric, before.best) == ("tell cats from dogs", "loss", None)
    attempt(run, 1, 0.0, HOUR, 4)
    log = EventLog(run.attempt(1).events_path("rank-0"))
    slices = {"night": {"value": 0.5, "best": 0.75}, "day": {"value": 0.9, "best": 0.9}}
    told = {"metric": "validation_accuracy", "higher_is_better": True, "value": 0.6, "best": 0.7, "best_step": 20}
    log.write("evaluated", step=30, slices=slices, **told)
    log.close()
    found = contract_status.load_contract_status(run, attempts.load_attempts(run), None)
    assert found is not None and (found.value, found.step, found.best, found.best_step) == (0.6, 30, 0.7, 20)
    assert {name: s.regression for name, s in found.slices.items()} == {"night": 0.25, "day": 0.0}
    assert found.used is not None and found.used.gpu_hours == 4.0 and found.remaining == {"gpu_hours": 6.0}


@pytest.mark.parametrize("name", ["rolled_back", "restored", "first_step"])
def test_an_evaluation_of_a_step_that_was_thrown_away_does_not_count(run: RunDir, name: str) -> None:
    fsio.write_json(run.record, {"contract": contract_status.build_record(Recipe())})
    log = EventLog(run.attempt(1).events_path("rank-0"))

    def now() -> float | None:
        found = contract_status.load_contract_status(run, [], None)
        assert found is not None and (found.value is None) == (found.step is None)
        return found.value

    log.write("evaluated", step=4, value=2.0)
    log.write("evaluated", step=8, value=1.0)
    assert now() == 1.0
    if name == "restored":
        log.close()
        log = EventLog(run.attempt(2).events_path("rank-0"))
        log.write("restored", step=4)
    elif name == "first_step":  # it found no checkpoint, so that it has restored none
        log.close()
        log = EventLog(run.attempt(2).events_path("rank-0"))
        log.write("first_step", step=1)
        assert now() is None
        log.write("evaluated", step=4, value=2.0)
    else:
        log.write("rolled_back", step=9, to_step=4)
    assert now() == 2.0
    log.write("evaluated", step=8, value=3.0)
    assert now() == 3.0
    log.write("rolled_back", step=9, to_step=2)
    assert now() is None
    log.close()


def test_an_evaluation_of_an_attempts_first_step_is_told_before_the_step_and_counts(run: RunDir) -> None:
    fsio.write_json(run.record, {"contract": contract_status.build_record(Recipe())})
    log = EventLog(run.attempt(1).events_path("rank-0"))
    log.write("evaluated", step=1, value=2.0)
    log.write("first_step", step=1)
    log.close()
    found = contract_status.load_contract_status(run, [], None)
    assert found is not None and found.value == 2.0

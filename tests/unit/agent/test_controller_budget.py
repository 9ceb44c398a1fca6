"""A start after attempts that were killed and have used up the budget."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from clustertrain import fsio
from clustertrain.agent.controller import JobController
from clustertrain.config.contract import ContractSpec
from clustertrain.config.job import RunSpec
from clustertrain.config.recipe import Recipe
from clustertrain.run import attempts, events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir

HOUR = 3600.0


class Starting(JobController):
    """A batch that has claimed the second attempt, two hours of four ranks after the first one began."""

    def __init__(self, run: RunDir, contract: ContractSpec) -> None:
        self.run, self.attempt, self.job_id = run, run.attempt(2), "7"
        self.spec = msgspec.structs.replace(RunSpec(), recipe=Recipe(contract=contract))
        self.log = EventLog(self.attempt.events_path("batch"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    for n in (1, 2):
        found.attempt(n).events.mkdir(parents=True)
    fsio.write_json(found.plan, {"world_size": 4})
    told = ({"t": 0.0, "event": "started"}, {"t": 2 * HOUR, "event": "signal"})
    lines = [json.dumps({"monotonic_s": 0.0, "host": "h", "pid": 1, **line}) for line in told]
    found.attempt(1).events_path("batch").write_text("\n".join(lines) + "\n")
    return found


def test_it_ends_before_its_first_step_where_the_budget_is_spent(run: RunDir) -> None:
    assert Starting(run, ContractSpec(gpu_hours=8.0)).stop_if_budget_spent() == 93
    ended = events.find_last(events.for_attempt(run.attempt(2)), "ended")
    assert ended is not None and ended["ending"] == "budget"
    assert attempts.load_attempts(run)[-1].stopped == "the budget is spent: 8 of gpu_hours = 8"


@pytest.mark.parametrize(
    "contract", [ContractSpec(gpu_hours=8.1), ContractSpec(gpu_hours=1.0, on_budget_spent="warn"), ContractSpec()]
)
def test_it_starts_where_something_is_left_or_it_only_warns(run: RunDir, contract: ContractSpec) -> None:
    assert Starting(run, contract).stop_if_budget_spent() is None
    assert events.find_last(events.for_attempt(run.attempt(2)), "ended") is None

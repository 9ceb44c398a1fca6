"""The start of an attempt after killed attempts that spent the budget."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from clustertrain import fsio
from clustertrain.agent.batch_process import BatchProcess
from clustertrain.config.contract import ContractSpec
from clustertrain.config.job import RunSpec
from clustertrain.config.recipe import Recipe
from clustertrain.run import attempts, events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir

HOUR = 3600.0


class StartingBatchProcess(BatchProcess):
    """A batch process that has claimed attempt 2. Attempt 1 ran on four ranks for two hours."""

    def __init__(self, run: RunDir, contract: ContractSpec) -> None:
        self.run, self.attempt, self.job_id = run, run.attempt(2), "7"
        self.spec = msgspec.structs.replace(RunSpec(), recipe=Recipe(contract=contract))
        self.log = EventLog(self.attempt.events_path("batch"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for n in (1, 2):
        run.attempt(n).events.mkdir(parents=True)
    fsio.write_json(run.plan, {"world_size": 4})
    records = ({"t": 0.0, "event": "started"}, {"t": 2 * HOUR, "event": "signal"})
    lines = [json.dumps({"monotonic_s": 0.0, "host": "h", "pid": 1, **line}) for line in records]
    run.attempt(1).events_path("batch").write_text("\n".join(lines) + "\n")
    return run


def test_attempt_ends_before_its_first_step_if_budget_is_spent(run: RunDir) -> None:
    assert StartingBatchProcess(run, ContractSpec(gpu_hours=8.0)).stop_if_budget_spent() == 93
    ended = events.find_last(events.for_attempt(run.attempt(2)), "ended")
    assert ended is not None and ended["ending"] == "budget"
    assert attempts.load_attempts(run)[-1].stopped == "the budget is spent: 8 of gpu_hours = 8"


@pytest.mark.parametrize(
    "contract",
    [ContractSpec(gpu_hours=8.1), ContractSpec(gpu_hours=1.0, on_budget_spent="warn"), ContractSpec()],
    ids=["left", "warn", "unlimited"],
)
def test_attempt_starts_if_budget_is_left_or_spending_only_warns(run: RunDir, contract: ContractSpec) -> None:
    assert StartingBatchProcess(run, contract).stop_if_budget_spent() is None
    assert events.find_last(events.for_attempt(run.attempt(2)), "ended") is None

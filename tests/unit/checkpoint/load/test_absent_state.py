"""Restore of a checkpoint that lacks a state the run has now, and a roll-back in the same process."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.load import restore, rollback
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager, SaveResult
from clustertrain.config.stability import StabilitySpec
from clustertrain.errors import CheckpointError, Diverged
from clustertrain.train.distributed.precision import LossScale
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.stability.monitor import StabilityMonitor
from clustertrain.train.stability.step_guard import StepGuard
from tests.unit.train.single_process import ALONE


class NewState:
    """State that older versions did not have."""

    def __init__(self) -> None:
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def manager(root: Path, results: list[SaveResult]) -> CheckpointManager:
    return CheckpointManager(
        root, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False), on_commit=results.append
    )


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((3,), value)}


def test_state_that_can_start_fresh_may_be_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = manager(tmp_path, [])
    checkpoints.save(4, state(4.0), wait=True)
    later = NewState()
    run_state = {**state(0.0), "later": later}
    restored = checkpoints.restore(run_state)
    assert restored is not None and run_state["weights"].tolist() == [4.0] * 3 and later.value == 1
    assert caplog.messages == [f"{tmp_path}/step-00000004: contains no state later, which starts fresh"]
    with pytest.raises(CheckpointError, match="contains no state other"):
        checkpoints.restore({**run_state, "other": torch.zeros(1)})
    later.value = 7
    checkpoints.save(5, {**state(5.0), "later": later}, wait=True)
    later.value = 8
    checkpoints.restore(run_state)
    assert later.value == 7
    checkpoints.roll_back(
        run_state, RollbackTarget(last_step=5, max_step=4, reason="a spike", excluded={}, max_rollbacks=1)
    )
    assert later.value == 1  # not its value from the discarded steps
    checkpoints.close()


def test_evaluation_stability_and_loss_scale_may_be_added(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, [])
    checkpoints.save(4, state(4.0), wait=True)
    loss = [{"validation_loss": 2.0}, {"validation_loss": 3.0}]
    evaluations = EvaluationSchedule(lambda: loss.pop(0), every=4, early_stopping=EarlyStopping())
    watch = StabilityMonitor(torch.nn.Linear(1, 1), StepGuard(StabilitySpec(), torch.device("cpu")), ALONE)
    scale = LossScale()
    later = {"evaluations": evaluations, "stability": watch, "loss_scale": scale}
    before = deepcopy({name: value.state_dict() for name, value in later.items()})  # type: ignore[attr-defined]
    run_state = {**state(0.0), **later}
    checkpoints.restore(run_state)
    assert evaluations.is_due(4, 8)  # for the model as it was saved
    evaluations.run(4)
    scale.update(overflow=True)
    watch.load_state_dict({
        "guard": {"losses": [1.0], "norms": [1.0], "clipped": [1.0]},
        "supervisor": {"in_a_row": 1, "first": 4, "skipped": 1, "overflows": 1},
        "trail": [[5, {"data": [8, 16]}]],
    })  # fmt: skip
    checkpoints.save(8, run_state, wait=True)
    checkpoints.roll_back(
        run_state, RollbackTarget(last_step=8, max_step=4, reason="a spike", excluded={}, max_rollbacks=1)
    )
    assert repr({name: value.state_dict() for name, value in later.items()}) == repr(before)  # type: ignore[attr-defined]
    assert evaluations.is_due(4, 8) and not evaluations.is_best(4)
    checkpoints.close()


def test_roll_back_and_repeat_steps(tmp_path: Path) -> None:
    results: list[SaveResult] = []
    checkpoints = manager(tmp_path, results)
    for step in (2, 4, 6):
        checkpoints.save(step, state(float(step)), wait=True)
    run_state = state(9.0)
    rolled_back = checkpoints.roll_back(
        run_state,
        RollbackTarget(last_step=7, max_step=4, reason="a spike", excluded={"data": [[8, 16]]}, max_rollbacks=1),
    )
    assert rolled_back is not None and rolled_back.step == 4 and run_state["weights"].tolist() == [4.0] * 3
    assert restore.excluded_ranges(checkpoints.restore_context) == {"data": [[8, 16]]}
    checkpoints.save(6, state(60.0), wait=True)
    assert [s.step for s in results] == [2, 4, 6, 6]  # the second save of step 6 is reported too
    restored_state = state(0.0)
    restored = checkpoints.restore(restored_state)
    assert restored is not None and restored.step == 6 and restored_state["weights"].tolist() == [60.0] * 3
    with pytest.raises(Diverged, match="rolled back 1 times"):
        checkpoints.roll_back(
            run_state, RollbackTarget(last_step=7, max_step=4, reason="a spike", excluded={}, max_rollbacks=1)
        )
    assert len(rollback.read_records(tmp_path)) == 1
    checkpoints.close()

"""A checkpoint without something that a run has now, and a way back in one process."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.checkpoint.core.control_group import Ranks
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


class Later:
    """Has a state that older versions did not have."""

    def __init__(self) -> None:
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def manager(root: Path, told: list[SaveResult]) -> CheckpointManager:
    return CheckpointManager(
        root, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False), on_commit=told.append
    )


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((3,), value)}


def test_what_can_begin_anew_need_not_be_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = manager(tmp_path, [])
    it.save(4, state(4.0), wait=True)
    later = Later()
    wanted = {**state(0.0), "later": later}
    restored = it.restore(wanted)
    assert restored is not None and wanted["weights"].tolist() == [4.0] * 3 and later.value == 1
    assert caplog.messages == [f"{tmp_path}/step-00000004: contains no state later, which starts fresh"]
    with pytest.raises(CheckpointError, match="contains no state other"):
        it.restore({**wanted, "other": torch.zeros(1)})
    later.value = 7
    it.save(5, {**state(5.0), "later": later}, wait=True)
    later.value = 8
    it.restore(wanted)
    assert later.value == 7
    it.roll_back(wanted, RollbackTarget(last_step=5, max_step=4, reason="a spike", excluded={}, max_rollbacks=1))
    assert later.value == 1  # and not what it was on the way that does not count
    it.close()


def test_a_run_may_come_to_have_evaluations_stability_and_a_loss_scale(tmp_path: Path) -> None:
    it = manager(tmp_path, [])
    it.save(4, state(4.0), wait=True)
    loss = [{"validation_loss": 2.0}, {"validation_loss": 3.0}]
    evaluations = EvaluationSchedule(lambda: loss.pop(0), every=4, early_stopping=EarlyStopping())
    watch = StabilityMonitor(torch.nn.Linear(1, 1), StepGuard(StabilitySpec(), torch.device("cpu")), ALONE)
    scale = LossScale()
    later = {"evaluations": evaluations, "stability": watch, "loss_scale": scale}
    before = deepcopy({name: value.state_dict() for name, value in later.items()})  # type: ignore[attr-defined]
    wanted = {**state(0.0), **later}
    it.restore(wanted)
    assert evaluations.is_due(4, 8)  # with the model as it was saved
    evaluations.run(4)
    scale.update(overflow=True)
    watch.load_state_dict({
        "guard": {"losses": [1.0], "norms": [1.0], "clipped": [1.0]},
        "supervisor": {"in_a_row": 1, "first": 4, "skipped": 1, "overflows": 1},
        "trail": [[5, {"data": [8, 16]}]],
    })  # fmt: skip
    it.save(8, wanted, wait=True)
    it.roll_back(wanted, RollbackTarget(last_step=8, max_step=4, reason="a spike", excluded={}, max_rollbacks=1))
    assert repr({name: value.state_dict() for name, value in later.items()}) == repr(before)  # type: ignore[attr-defined]
    assert evaluations.is_due(4, 8) and not evaluations.is_best(4)
    it.close()


def test_the_way_back_and_the_same_steps_once_more(tmp_path: Path) -> None:
    told: list[SaveResult] = []
    it = manager(tmp_path, told)
    for step in (2, 4, 6):
        it.save(step, state(float(step)), wait=True)
    now = state(9.0)
    back = it.roll_back(
        now, RollbackTarget(last_step=7, max_step=4, reason="a spike", excluded={"data": [[8, 16]]}, max_rollbacks=1)
    )
    assert back is not None and back.step == 4 and now["weights"].tolist() == [4.0] * 3
    assert restore.excluded_ranges(it.restore_context) == {"data": [[8, 16]]}
    it.save(6, state(60.0), wait=True)
    assert [s.step for s in told] == [2, 4, 6, 6]  # told of the new one too
    again = state(0.0)
    restored = it.restore(again)
    assert restored is not None and restored.step == 6 and again["weights"].tolist() == [60.0] * 3
    with pytest.raises(Diverged, match="rolled back 1 times"):
        it.roll_back(now, RollbackTarget(last_step=7, max_step=4, reason="a spike", excluded={}, max_rollbacks=1))
    assert len(rollback.read_records(tmp_path)) == 1
    it.close()

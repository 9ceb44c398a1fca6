"""A checkpoint of a version that did not save something yet, and a way back in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.checkpoint import rollback
from clustertrain.checkpoint.agree import Ranks
from clustertrain.checkpoint.manager import CheckpointManager, Saved
from clustertrain.checkpoint.rollback import Wanted
from clustertrain.errors import CheckpointError, Diverged


class Later:
    """Has a state that older versions did not have."""

    def __init__(self, absent: bool) -> None:
        self.may_be_absent = absent
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def manager(root: Path, told: list[Saved]) -> CheckpointManager:
    return CheckpointManager(root, Ranks(), attempt="1", layout={}, background=False, on_commit=told.append)


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((3,), value)}


def test_what_older_versions_did_not_save_stays_as_it_is(tmp_path: Path) -> None:
    it = manager(tmp_path, [])
    it.save(4, state(4.0), wait=True)
    wanted = {**state(0.0), "later": Later(absent=True)}
    restored = it.restore(wanted)
    assert restored is not None and wanted["weights"].tolist() == [4.0] * 3 and wanted["later"].value == 1
    with pytest.raises(CheckpointError, match="holds no state later"):
        it.restore({**state(0.0), "later": Later(absent=False)})
    later = Later(absent=True)
    later.value = 7
    it.save(5, {**state(5.0), "later": later}, wait=True)
    it.restore(wanted)
    assert wanted["later"].value == 7
    it.close()


def test_the_way_back_and_the_same_steps_once_more(tmp_path: Path) -> None:
    told: list[Saved] = []
    it = manager(tmp_path, told)
    for step in (2, 4, 6):
        it.save(step, state(float(step)), wait=True)
    now = state(9.0)
    back = it.go_back(now, Wanted(last=7, most=4, why="a spike", left_out={"data": [[8, 16]]}, most_often=1))
    assert back is not None and back.step == 4 and now["weights"].tolist() == [4.0] * 3
    assert it.left_out() == {"data": [[8, 16]]}
    it.save(6, state(60.0), wait=True)
    assert [s.step for s in told] == [2, 4, 6, 6]  # told of the new one too
    again = state(0.0)
    restored = it.restore(again)
    assert restored is not None and restored.step == 6 and again["weights"].tolist() == [60.0] * 3
    with pytest.raises(Diverged, match="gone back 1 times"):
        it.go_back(now, Wanted(last=7, most=4, why="a spike", left_out={}, most_often=1))
    assert len(rollback.read(tmp_path)) == 1
    it.close()

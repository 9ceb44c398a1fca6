"""The stop of torchtitan's Trainer, whose checkpoint manager is called after each step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertrain.rank_hooks.clustertrain_hooks import torchtitan_checkpoints
from clustertrain.rank_hooks.clustertrain_hooks.progress import Progress
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank


class CheckpointManager:
    """The public part of that of torchtitan 0.2 and 0.3."""

    def __init__(self, enable: bool = True, load_only: bool = False) -> None:
        self.enable, self.load_only = enable, load_only
        self.last_save_model_only = self.last_save_in_hf = True
        self.saved: list[tuple[int, bool]] = []

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if last_step or curr_step % 4 == 0:
            self.saved.append((curr_step, last_step and self.last_save_model_only))


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Progress:
    monkeypatch.setattr(CheckpointManager, "save", CheckpointManager.save)
    monkeypatch.setattr(torchtitan_checkpoints, "_stop", None)
    progress = Progress(Rank(rank=0, world_size=1, attempt=1, run_dir=str(tmp_path), rank_dir=str(tmp_path)))
    monkeypatch.setattr(torchtitan_checkpoints, "get_progress", lambda: progress)
    module: Any = SimpleNamespace(CheckpointManager=CheckpointManager)
    torchtitan_checkpoints.install(module)
    torchtitan_checkpoints.install(module)  # from 0.3 on, two modules have the class
    return progress


def train(manager: CheckpointManager, progress: Progress, steps: int) -> None:
    for step in range(1, steps + 1):
        progress.end_step(step)
        manager.save(step, last_step=step == steps)


def test_all_of_the_state_is_saved_at_the_agreed_step(progress: Progress) -> None:
    progress.rank.write("stop-step.json", {"id": 1, "step": 6, "is_agreed": True})
    manager = CheckpointManager()
    with pytest.raises(SystemExit) as ended:
        train(manager, progress, 20)
    assert ended.value.code == 75
    assert manager.saved == [(4, False), (6, False)]
    assert progress.rank.read("stop-answer-0.json")["accepts"]


@pytest.mark.parametrize("options", [{"enable": False}, {"load_only": True}])
def test_manager_that_cannot_save_offers_no_stop(progress: Progress, options: dict[str, bool]) -> None:
    progress.rank.write("stop-step.json", {"id": 1, "step": 6, "is_agreed": True})
    train(CheckpointManager(**options), progress, 8)
    assert progress.rank.read("stops-0.json") is None


def test_last_save_is_the_program_s(progress: Progress) -> None:
    manager = CheckpointManager()
    progress.end_step(1)
    manager.save(1)
    assert progress.rank.read("stops-0.json")["framework"] == "torchtitan"
    train(manager, progress, 5)
    assert manager.saved == [(4, False), (5, True)]
    assert progress.rank.read("stops-0.json") is None  # SIGTERM ends it again

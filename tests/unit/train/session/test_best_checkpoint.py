"""Retention of the best checkpoint along with the newest ones, also after a rollback and a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.offline import inspect
from clustertrain.config.job import RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.train.core.result import RankResultWriter
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.session.checkpointing import SessionCheckpointer
from clustertrain.train.stability.divergence import Rollback
from tests.unit.train.single_process import ALONE

LOSS = "validation_loss"


class Run:
    """Session that saves like the step loop, has no model, and evaluates every two steps to ``losses[step]``."""

    def __init__(self, root: Path, losses: dict[int, float], *, every: int, **checkpoint: Any) -> None:
        self.root = root
        recipe = {"recipe": {"checkpoint": {"async_save": False, **checkpoint}}}
        context = dataclasses.replace(ALONE, spec=build(recipe, RunSpec, "spec.toml"))
        self._groups = ProcessGroups(None, None, None, None)
        callbacks: dict[str, Any] = {"emit_event": lambda name, **fields: None, "get_deadline": lambda: None}
        self._checkpointer = SessionCheckpointer(context, self._groups, root, 1, RankResultWriter({}), **callbacks)
        self.early_stopping = EarlyStopping()
        self._step = 0
        self._evaluations = EvaluationSchedule(
            lambda: {LOSS: losses[self._step]}, every=2, early_stopping=self.early_stopping
        )
        self._state: dict[str, Any] = {"evaluations": self._evaluations, "note": "of the run"}
        self._checkpointer.open(10**6, every, None, self.early_stopping)
        self.step = self._checkpointer.restore(self._state, seed=1)

    def train_to(self, last: int) -> None:
        while self.step < last:
            self.step = self._step = self.step + 1
            metrics = self._evaluations.run(self.step) if self._evaluations.is_due(self.step, 0) else {}
            best = self._checkpointer.keeps_best and self._evaluations.is_best(self.step)
            if best or self._checkpointer.is_due(self.step):
                self._checkpointer.save(self.step, self._state, "interval", metrics)

    def roll_back(self, last_step: int, max_step: int) -> None:
        target = RollbackTarget(last_step=last_step, max_step=max_step, reason="a spike", excluded={}, max_rollbacks=3)
        self.step = self._checkpointer.roll_back(self._state, 1, Rollback(last_step, last_step, "a spike"), target)

    @property
    def steps(self) -> list[int | None]:
        return [index.parse_step(p) for p in index.list_checkpoint_folders(self.root)]

    @property
    def best(self) -> tuple[int | None, float | None]:
        return self.early_stopping.best_step, self.early_stopping.best

    def close(self) -> None:
        self._checkpointer.close()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    created: list[Run] = []

    def make(losses: dict[int, float], **options: Any) -> Run:
        created.append(Run(tmp_path / "c", losses, **options))
        return created[-1]

    yield make
    for run in created:
        run.close()


FALLING = {step: 100.0 - step for step in range(0, 100, 2)}


def test_best_checkpoint_does_not_displace_the_newest(runs: Any) -> None:
    run = runs(FALLING, every=10, keep=3)
    run.train_to(8)
    assert run.steps == [4, 6, 8]  # there is nothing else to roll back to
    run.train_to(36)
    assert run.steps == [10, 20, 30, 36]
    reasons = [index.read_manifest(p).reason for p in index.list_checkpoint_folders(run.root)]
    assert reasons == ["interval"] * 3 + ["best"]
    run.roll_back(37, 25)
    assert (run.step, run.best, run.steps) == (20, (20, 80.0), [10, 20])


def test_keep_best_0_saves_no_best_checkpoint(runs: Any) -> None:
    run = runs(FALLING, every=10, keep=3, keep_best=0)
    run.train_to(26)
    assert run.steps == [10, 20]


# A better checkpoint replaces the best one, and the run rolls back to a step before it.
RISING_AND_FALLING = {2: 5.0, 4: 6.0, 6: 3.0, 8: 5.5}


def test_best_after_rollback_is_an_existing_checkpoint(runs: Any) -> None:
    run = runs(RISING_AND_FALLING, every=4, keep=1)
    run.train_to(6)
    assert (run.steps, run.best) == ([4, 6], (6, 3.0))
    run.roll_back(7, 5)
    assert (run.step, run.steps) == (4, [4])
    assert run.best == (4, 6.0) and inspect.find_best(run.root).name == "step-00000004"
    run.train_to(8)
    assert run.best == (6, 3.0) and inspect.find_best(run.root).name == "step-00000006"


def test_best_after_resume_is_an_existing_checkpoint(runs: Any) -> None:
    first = runs(RISING_AND_FALLING, every=4, keep=1)
    first.train_to(6)
    (first.root / "step-00000006" / "rank-0.bin").write_bytes(b"")
    second = runs(RISING_AND_FALLING, every=4, keep=1)
    assert (second.step, second.best) == (4, (4, 6.0))


def test_next_evaluation_is_best_without_earlier_ones(runs: Any) -> None:
    run = runs({2: 5.0, 4: 3.0, 6: 5.5}, every=3, keep=1)
    run.train_to(4)
    assert run.steps == [3, 4]
    run.roll_back(5, 3)
    assert (run.step, run.best) == (3, (None, None))
    run.train_to(4)
    assert run.best == (4, 3.0)

"""The best checkpoint beside the newest ones: while it gets better, on a way back, after a resume."""

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
from tests.unit.train.alone import ALONE

LOSS = "validation_loss"


class Run:
    """Saves as the loop of a session does; no model, and evaluations every two steps of ``losses``, by step."""

    def __init__(self, root: Path, losses: dict[int, float], *, every: int, **checkpoint: Any) -> None:
        self.root = root
        recipe = {"recipe": {"checkpoint": {"async_save": False, **checkpoint}}}
        context = dataclasses.replace(ALONE, spec=build(recipe, RunSpec, "spec.toml"))
        self._groups = ProcessGroups(None, None, None, None)
        told: dict[str, Any] = {"emit_event": lambda name, **fields: None, "get_deadline": lambda: None}
        self._keeping = SessionCheckpointer(context, self._groups, root, 1, RankResultWriter({}), **told)
        self.judge = EarlyStopping()
        self._at = 0
        self._evaluations = EvaluationSchedule(lambda: {LOSS: losses[self._at]}, every=2, early_stopping=self.judge)
        self._state: dict[str, Any] = {"evaluations": self._evaluations, "note": "of the run"}
        self._keeping.open(10**6, every, None, self.judge)
        self.step = self._keeping.restore(self._state, seed=1)

    def to(self, last: int) -> None:
        while self.step < last:
            self.step = self._at = self.step + 1
            found = self._evaluations.run(self.step) if self._evaluations.is_due(self.step, 0) else {}
            best = self._keeping.keeps_best and self._evaluations.is_best(self.step)
            if best or self._keeping.is_due(self.step):
                self._keeping.save(self.step, self._state, "interval", found)

    def back(self, bad: int, most: int) -> None:
        wanted = RollbackTarget(last_step=bad, max_step=most, reason="a spike", excluded={}, max_rollbacks=3)
        self.step = self._keeping.roll_back(self._state, 1, Rollback(bad, bad, "a spike"), wanted)

    @property
    def kept(self) -> list[int | None]:
        return [index.parse_step(p) for p in index.list_checkpoint_folders(self.root)]

    @property
    def best(self) -> tuple[int | None, float | None]:
        return self.judge.best_step, self.judge.best

    def close(self) -> None:
        self._keeping.close()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def make(losses: dict[int, float], **options: Any) -> Run:
        made.append(Run(tmp_path / "c", losses, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()


BETTER_AND_BETTER = {step: 100.0 - step for step in range(0, 100, 2)}


def test_what_is_saved_for_its_evaluation_pushes_out_none_of_the_newest(runs: Any) -> None:
    run = runs(BETTER_AND_BETTER, every=10, keep=3)
    run.to(8)
    assert run.kept == [4, 6, 8]  # as long as there is nothing else to go back to
    run.to(36)
    assert run.kept == [10, 20, 30, 36]
    reasons = [index.read_manifest(p).reason for p in index.list_checkpoint_folders(run.root)]
    assert reasons == ["interval"] * 3 + ["best"]
    run.back(37, 25)
    assert (run.step, run.best, run.kept) == (20, (20, 80.0), [10, 20])


def test_without_a_best_one_to_keep_none_is_made(runs: Any) -> None:
    run = runs(BETTER_AND_BETTER, every=10, keep=3, keep_best=0)
    run.to(26)
    assert run.kept == [10, 20]


# The best one goes when a better one comes, and to that the run does not come back.
UP_AND_DOWN = {2: 5.0, 4: 6.0, 6: 3.0, 8: 5.5}


def test_on_the_way_back_only_what_is_there_counts_as_best(runs: Any) -> None:
    run = runs(UP_AND_DOWN, every=4, keep=1)
    run.to(6)
    assert (run.kept, run.best) == ([4, 6], (6, 3.0))
    run.back(7, 5)
    assert (run.step, run.kept) == (4, [4])
    assert run.best == (4, 6.0) and inspect.find_best(run.root).name == "step-00000004"
    run.to(8)
    assert run.best == (6, 3.0) and inspect.find_best(run.root).name == "step-00000006"


def test_after_a_resume_too(runs: Any) -> None:
    first = runs(UP_AND_DOWN, every=4, keep=1)
    first.to(6)
    (first.root / "step-00000006" / "rank-0.bin").write_bytes(b"")
    second = runs(UP_AND_DOWN, every=4, keep=1)
    assert (second.step, second.best) == (4, (4, 6.0))


def test_without_any_that_was_measured_the_next_one_is_the_best(runs: Any) -> None:
    run = runs({2: 5.0, 4: 3.0, 6: 5.5}, every=3, keep=1)
    run.to(4)
    assert run.kept == [3, 4]
    run.back(5, 3)
    assert (run.step, run.best) == (3, (None, None))
    run.to(4)
    assert run.best == (4, 3.0)

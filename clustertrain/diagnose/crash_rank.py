"""``python -m clustertrain.diagnose.crash_rank STEP COMMITTED``: a rank of the built-in trainer that kills itself.

The loop is the trainer's own. Before optimizer step STEP (counted from 0), as soon as the checkpoint of step COMMITTED
is there, the process gets the signal that nobody can catch.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

from clustertrain import clock
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train import trainer as loop
from clustertrain.train.core.context import read_plan
from clustertrain.train.core.step_types import StepResult
from clustertrain.train.main import as_rank
from clustertrain.train.session.session import Session
from clustertrain.train.trainer import Trainer, trainer

PATIENCE_S = 300.0  # for the save under way


def main() -> int:
    last, committed = int(sys.argv[1]), int(sys.argv[2])

    def work(run: RunDir | None) -> None:
        assert run is not None

        @dataclasses.dataclass(frozen=True)
        class Ended(Trainer):
            def step(self) -> StepResult:
                if self.session.step >= last:
                    assert run is not None
                    clock.wait_until(lambda: committed in run.committed_steps(), PATIENCE_S)
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().step()

        def ending(s: Session, recipe: Recipe, batch: Batch) -> Trainer:
            made = trainer(s, recipe, batch)
            return Ended(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})

        loop.trainer = ending
        loop.train(load_spec(run).recipe, read_plan(run)[1])

    return as_rank(work)


if __name__ == "__main__":
    sys.exit(main())

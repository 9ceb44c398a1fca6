"""``python -m clustertrain.diagnose.crash_rank STEP COMMITTED``: a rank of the built-in trainer that kills itself.

It runs the trainer's loop unchanged. Before optimizer step STEP (counted from 0), once the checkpoint of step COMMITTED
exists, it sends itself SIGKILL.
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
from clustertrain.train import trainer
from clustertrain.train.core.context import load_plan
from clustertrain.train.core.step_types import StepResult
from clustertrain.train.main import run_as_rank
from clustertrain.train.session.session import Session
from clustertrain.train.trainer import Trainer

CHECKPOINT_TIMEOUT_S = 300.0  # for the pending save to be committed


def main() -> int:
    kill_step, checkpoint_step = int(sys.argv[1]), int(sys.argv[2])

    def rank_main(run: RunDir | None) -> None:
        assert run is not None

        original_build_trainer = trainer.build_trainer

        @dataclasses.dataclass(frozen=True)
        class KilledTrainer(Trainer):
            def step(self) -> StepResult:
                if self.session.step >= kill_step:
                    assert run is not None
                    clock.wait_until(lambda: checkpoint_step in run.committed_steps(), CHECKPOINT_TIMEOUT_S)
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().step()

        def build_killed_trainer(session: Session, recipe: Recipe, batch: Batch) -> Trainer:
            base = original_build_trainer(session, recipe, batch)
            return KilledTrainer(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})

        trainer.build_trainer = build_killed_trainer
        trainer.train(load_spec(run).recipe, load_plan(run)[1])

    return run_as_rank(rank_main)


if __name__ == "__main__":
    sys.exit(main())

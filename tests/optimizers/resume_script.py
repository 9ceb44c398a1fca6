"""What each rank does: train with one optimizer after another, each with checkpoints of its own in ``FOLDER``, up to
``TOTAL`` steps; leaves the losses of the steps that it did in ``OUT``. Arguments: FOLDER, TOTAL, OUT, then names."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import clustertrain as ct
from clustertrain.run.folder import RunDir
from clustertrain.run.spec import load_spec
from clustertrain.spec.optim import OptimSpec
from clustertrain.spec.schedule import ScheduleSpec
from clustertrain.train.context import read_plan
from clustertrain.train.losses import cross_entropy
from clustertrain.train.model import Decoder
from clustertrain.train.optimizers import catalogue
from clustertrain.train.schedule import LearningRate
from clustertrain.train.text import ByteText
from tests.optimizers.cells import CELLS, THAW_STEP

run = RunDir(Path(os.environ["CLUSTERTRAIN_RUN_DIR"]))
recipe, batch = load_spec(run).recipe, read_plan(run)[1]
folder, total, out, names = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]


def losses(name: str) -> dict[str, list[float]]:
    """By step its loss and gradient norm."""
    spec = OptimSpec(**CELLS[name])
    found = {}
    with ct.session(checkpoint_dir=folder / name) as session:
        with torch.device("meta"):
            model: torch.nn.Module = Decoder(recipe.model)
        # The norms of the last layer of all; what is frozen for good has no state and is in no norm.
        model = session.parallelize(model, freeze=["layers.0.ffn"], unfreeze=[(THAW_STEP, ["layers.1", "norm"])])
        groups = session.parameter_groups(spec.name, layer_decay=0.8, lr_scale={"head": 2.0})
        optimizer = session.optimizer(spec.name, groups, **catalogue.options(spec, text=True, device=session.device))
        rate = LearningRate(ScheduleSpec(kind="constant", warmup_steps=2), peak=spec.lr, total=20)
        data = session.loader(ByteText(recipe.data), global_batch=batch.global_batch, micro_batch=batch.micro_batch)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": data, "schedule": rate}
        for step in session.steps(total, state):
            rate.apply(optimizer, step + 1)
            done = session.train_step(next(data), cross_entropy, clip_norm=1.0)
            found[str(step + 1)] = [float(done.loss), float(done.grad_norm)]
    return found


found = {name: losses(name) for name in names}
if os.environ["RANK"] == "0":
    out.write_text(json.dumps(found))

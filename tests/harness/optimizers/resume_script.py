"""A script that trains one model per optimizer up to step ``TOTAL``, with checkpoints in ``FOLDER``, and writes the
loss and gradient norm of each step to ``OUT``. Arguments: FOLDER, TOTAL, OUT, then the optimizers' names."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import clustertrain as ct
from clustertrain.config.optim import OptimSpec
from clustertrain.config.schedule import ScheduleSpec
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core.context import load_plan
from clustertrain.train.data.text import ByteText
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.models.losses import cross_entropy
from clustertrain.train.optim import registry
from clustertrain.train.optim.lr_schedule import LearningRate
from clustertrain.train.session.session import get_runtime
from tests.harness.optimizers.cells import CELLS, THAW_STEP

run = RunDir(Path(os.environ["CLUSTERTRAIN_RUN_DIR"]))
recipe, batch = load_spec(run).recipe, load_plan(run)[1]
folder, total, out, names = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]


def build(session: ct.Session, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the train step and the checkpointed state of a model with the optimizer ``name``."""
    spec = OptimSpec(**CELLS[name])
    with torch.device("meta"):
        model: torch.nn.Module = Decoder(recipe.model)
    # The unfrozen norm is in the last stage. Layers that stay frozen have no state and are not in the gradient norm.
    model = session.parallelize(model, freeze=["layers.0.ffn"], unfreeze=[(THAW_STEP, ["layers.1", "norm"])])
    groups = session.parameter_groups(spec.name, layer_decay=0.8, lr_scale={"head": 2.0})
    get_runtime(session).state.train_step = None  # several models in one session, which scripts cannot have
    optimizer = session.optimizer(
        spec.name, groups, **registry.build_options(spec, is_text=True, device=session.device)
    )
    rate = LearningRate(ScheduleSpec(kind="constant", warmup_steps=2), peak=spec.lr, total=20)
    data = session.loader(ByteText(recipe.data), global_batch=batch.global_batch, micro_batch=batch.micro_batch)
    state = {"model": model, "optimizer": optimizer, "data": data, "schedule": rate}
    return get_runtime(session).state.train_step, state


results: dict[str, dict[str, list[float]]] = {name: {} for name in names}
with ct.session(checkpoint_dir=folder) as session:
    parts = {name: build(session, name) for name in names}
    state = {f"{key}-{name}": value for name, (_, part) in parts.items() for key, value in part.items()}
    for step in session.steps(total, state):
        for name, (get_runtime(session).state.train_step, part) in parts.items():
            part["schedule"].apply(part["optimizer"], step + 1)
            result = session.train_step(next(part["data"]), cross_entropy, clip_norm=1.0)
            results[name][str(step + 1)] = [float(result.loss), float(result.grad_norm)]
    if session.is_main:
        out.write_text(json.dumps(results))

"""A training script that trains the same tiny decoder with one optimizer after another, and writes the losses and
gradient norms of each, or why it was refused, to ``OUT``. Arguments: OUT, then the optimizers' names."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

import clustertrain as ct
from clustertrain.errors import ClusterTrainError
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core.context import load_plan
from clustertrain.train.data.text import ByteText
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.models.losses import cross_entropy
from clustertrain.train.optim import registry
from clustertrain.train.session.session import get_runtime
from tests.harness.optimizers.cells import CELLS, STEPS

run = RunDir(Path(os.environ["CLUSTERTRAIN_RUN_DIR"]))
recipe, batch = load_spec(run).recipe, load_plan(run)[1]


def train(session: ct.Session, name: str) -> dict[str, Any]:
    spec = msgspec.structs.replace(recipe.optim, **CELLS[name])
    with torch.device("meta"):
        model: torch.nn.Module = Decoder(recipe.model)
    get_runtime(session).state.train_step = None  # several optimizers in one session, which scripts cannot have
    model = session.parallelize(model)
    groups = session.parameter_groups(spec.name, weight_decay=spec.weight_decay)
    session.optimizer(spec.name, groups, **registry.build_options(spec, is_text=True, device=session.device))
    data = session.loader(ByteText(recipe.data), global_batch=batch.global_batch, micro_batch=batch.micro_batch)
    losses, norms = [], []
    for _ in range(STEPS):
        result = session.train_step(next(data), cross_entropy, clip_norm=1.0)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    return {"losses": losses, "norms": norms}


out, names = Path(sys.argv[1]), sys.argv[2:]
results: dict[str, Any] = {}
with ct.session() as session:
    for name in names:
        try:
            results[name] = train(session, name)
        except ClusterTrainError as e:
            results[name] = {"refused": str(e)}
        except Exception:
            traceback.print_exc()
            raise
    if session.is_main:
        out.write_text(json.dumps(results))

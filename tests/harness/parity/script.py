"""The training script of a cell, as a user would write it.

Its arguments are the optimizer's name, and "documents" or "text".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import clustertrain as ct
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core.context import load_plan
from clustertrain.train.data.text import ByteText
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.models.losses import cross_entropy
from clustertrain.train.optim import registry
from tests.harness.parity.documents import DocumentText

run = RunDir(Path(os.environ["CLUSTERTRAIN_RUN_DIR"]))
recipe, batch = load_spec(run).recipe, load_plan(run)[1]

with ct.session() as session:
    with torch.device("meta"):
        model: torch.nn.Module = Decoder(recipe.model)
    model = session.parallelize(model)
    if sys.argv[1] == "sgd":
        optimizer = session.optimizer(torch.optim.SGD, lr=recipe.optim.lr)
    else:
        options = registry.build_options(recipe.optim, is_text=True, device=session.device)
        optimizer = session.optimizer("adamw", weight_decay=recipe.optim.weight_decay, **options)
    dataset = DocumentText(recipe.data) if sys.argv[2] == "documents" else ByteText(recipe.data)
    data = session.loader(dataset, global_batch=batch.global_batch, micro_batch=batch.micro_batch)
    for _ in session.steps(recipe.train.steps):
        result = session.train_step(next(data), cross_entropy, clip_norm=recipe.optim.clip_norm)
        session.log(loss=result.loss, grad_norm=result.grad_norm, skipped=result.skipped)

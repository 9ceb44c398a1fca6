"""The training script of a cell, as a user would write it, with a learning rate schedule in its state. It writes the
samples of each step to a file, and saves the restored state again under another step number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import clustertrain as ct
from clustertrain import fsio
from clustertrain.checkpoint.load import shared_read
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core.context import load_plan
from clustertrain.train.data.text import ByteText
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.models.losses import cross_entropy
from clustertrain.train.session.session import get_runtime
from tests.harness.reshape.cells import RESAVED_AT, SAVED_AT, STEPS

# Lower the limits, because the ranks of a node would not share reads of such a small model.
shared_read.MIN_SHARED_BYTES, shared_read.CHUNK_BYTES, shared_read.LOAD_BYTES = 1 << 10, 1 << 12, 1 << 13

run = RunDir(Path(os.environ["CLUSTERTRAIN_RUN_DIR"]))
recipe, (layout, batch, _) = load_spec(run).recipe, load_plan(run)


class RecordingText(ByteText):
    """Byte text that records which samples are read."""

    def __init__(self) -> None:
        super().__init__(recipe.data)
        self.samples: list[int] = []

    def __getitem__(self, i: int) -> Any:
        self.samples.append(i)
        return super().__getitem__(i)


with ct.session() as session:
    with torch.device("meta"):
        model: torch.nn.Module = Decoder(recipe.model)
    model = session.parallelize(model)
    optimizer = session.optimizer(torch.optim.AdamW, lr=recipe.optim.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    dataset = RecordingText()
    data = session.loader(dataset, global_batch=batch.global_batch, micro_batch=batch.micro_batch)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data}
    scale = get_runtime(session).loss_scale
    if scale is not None:
        # It doubles before the checkpoint, and again at a step that depends on the restored state; too low to overflow.
        scale.scale, scale.growth_interval = 64.0, 2
    file_name = f"samples-{layout.data_rank(session.rank)}-{session.rank}.jsonl"
    samples = fsio.JsonlAppender(Path(os.environ["CLUSTERTRAIN_RANK_DIR"], file_name))
    restored = True
    for step in session.steps(STEPS, state, checkpoint_every=SAVED_AT):
        if restored and step == SAVED_AT:
            get_runtime(session).checkpointer.save(RESAVED_AT, state, "end", {})
        restored = False
        dataset.samples.clear()
        result = session.train_step(next(data), cross_entropy, clip_norm=1.0)
        schedule.step()
        samples.append({"step": step + 1, "samples": dataset.samples})
        session.log(
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=optimizer.param_groups[0]["lr"],
            scale=scale.scale if scale is not None else None,
        )

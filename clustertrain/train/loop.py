"""The built-in trainer: the session API with a model, data, an optimizer and a schedule chosen by the recipe."""

from __future__ import annotations

import torch

from clustertrain.plan.layout import Batch
from clustertrain.spec.recipe import Recipe
from clustertrain.train import optim, schedule
from clustertrain.train.models import task
from clustertrain.train.session import session


def train(recipe: Recipe, batch: Batch) -> None:
    """Train to ``recipe.train.steps``. ``batch`` is the plan's split of the global batch."""
    total = recipe.train.steps
    warmup = schedule.warmup_steps(recipe.schedule, total)
    with session() as s:
        what = task(recipe)
        model = s.parallelize(what.model)
        groups = optim.decay_groups(model, recipe.optim.weight_decay)
        optimizer = s.optimizer(torch.optim.AdamW, groups, **optim.adamw(recipe.optim, s.device))
        data = s.loader(
            what.dataset,
            global_batch=batch.global_batch,
            micro_batch=batch.micro_batch,
            workers=recipe.data.workers,
            ragged=True,
        )
        s.tokens_per_step = batch.global_batch * recipe.tokens_per_sample
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in s.steps(total, state, checkpoint_every=recipe.checkpoint.every, keep=recipe.checkpoint.keep):
            lr = schedule.warmup_cosine(
                step + 1, total, peak=recipe.optim.lr, warmup=warmup, floor=recipe.schedule.floor
            )
            for group in optimizer.param_groups:
                group["lr"] = lr
            done = s.train_step(next(data), what.loss, clip_norm=recipe.optim.clip_norm)
            s.log(loss=done.loss, lr=lr, grad_norm=done.grad_norm)

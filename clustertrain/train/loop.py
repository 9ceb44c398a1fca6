"""The built-in trainer: the session API with a model, data, an optimizer and a schedule chosen by the recipe."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from clustertrain.plan.layout import Batch
from clustertrain.spec.recipe import Recipe
from clustertrain.train import optim, schedule
from clustertrain.train.model import Decoder
from clustertrain.train.session import session
from clustertrain.train.text import ByteText


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Cross-entropy in fp32, summed over the tokens, and how many they are. ``logits`` (batch, length, vocab_size),
    ``targets`` (batch, length)."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return loss, targets.numel()


def train(recipe: Recipe, batch: Batch) -> None:
    """Train to ``recipe.train.steps``. ``batch`` is the plan's split of the global batch."""
    total = recipe.train.steps
    warmup = schedule.warmup_steps(recipe.schedule, total)
    with session() as s:
        with torch.device("meta"):
            model: torch.nn.Module = Decoder(recipe.model)
        model = s.parallelize(model)
        groups = optim.decay_groups(model, recipe.optim.weight_decay)
        optimizer = s.optimizer(torch.optim.AdamW, groups, **optim.adamw(recipe.optim, s.device))
        data = s.loader(
            ByteText(recipe.data),
            global_batch=batch.global_batch,
            micro_batch=batch.micro_batch,
            workers=recipe.data.workers,
            ragged=True,
        )
        s.tokens_per_step = batch.global_batch * recipe.data.seq_len
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in s.steps(total, state, checkpoint_every=recipe.checkpoint.every, keep=recipe.checkpoint.keep):
            lr = schedule.warmup_cosine(
                step + 1, total, peak=recipe.optim.lr, warmup=warmup, floor=recipe.schedule.floor
            )
            for group in optimizer.param_groups:
                group["lr"] = lr
            done = s.train_step(next(data), token_loss, clip_norm=recipe.optim.clip_norm)
            s.log(loss=done.loss, lr=lr, grad_norm=done.grad_norm)

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


def train(recipe: Recipe, batch: Batch) -> None:
    """Train to ``recipe.train.steps``. ``batch`` is the plan's split of the global batch."""
    total = recipe.train.steps
    warmup = schedule.warmup_steps(recipe.schedule, total)
    with session() as s:
        with torch.device("meta"):
            model: torch.nn.Module = Decoder(recipe.model)
        model = s.parallelize(model)
        optimizer = optim.adamw(model, recipe.optim, s.device)
        data = s.loader(
            ByteText(recipe.data),
            global_batch=batch.global_batch,
            micro_batch=batch.micro_batch,
            workers=recipe.data.workers,
        )
        s.tokens_per_step = batch.global_batch * recipe.data.seq_len
        tokens_per_rank = s.tokens_per_step / s.world_size
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in s.steps(total, state, checkpoint_every=recipe.checkpoint.every, keep=recipe.checkpoint.keep):
            lr = schedule.warmup_cosine(
                step + 1, total, peak=recipe.optim.lr, warmup=warmup, floor=recipe.schedule.floor
            )
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = torch.zeros((), device=s.device)
            for tokens in s.accumulate(model, next(data)):
                with s.autocast():
                    logits = model(tokens[:, :-1])
                # Divided by all tokens of the rank's step: the ranks hold equally many, so the mean of their gradients
                # is that of the global batch, whatever the micro-batches are.
                part = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
                part = part / tokens_per_rank
                part.backward()  # type: ignore[no-untyped-call]
                loss += part.detach()
            grad_norm = s.clip_grad_norm(model, recipe.optim.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            s.log(loss=s.mean(loss), lr=lr, grad_norm=grad_norm)

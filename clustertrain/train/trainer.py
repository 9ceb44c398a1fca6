"""The built-in trainer: the session API with a model, data, an optimizer and a schedule chosen by the recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from clustertrain.config.evaluation import PREFIX
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch
from clustertrain.train.core.step_types import Loss, StepResult
from clustertrain.train.data import describe
from clustertrain.train.data.loader import Loader
from clustertrain.train.models.build import Task, task
from clustertrain.train.optim import registry
from clustertrain.train.optim.lr_schedule import LearningRate
from clustertrain.train.recipe_evaluation import of_recipe
from clustertrain.train.session.session import Session, session
from clustertrain.train.stability.clipping import Clipping


@dataclass(frozen=True)
class Trainer:
    """What a recipe trains with, in a session."""

    session: Session
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Loader
    loss: Loss
    clip: Clipping

    def step(self) -> StepResult:
        """One optimizer step over the next global batch."""
        return self.session.train_step(next(self.data), self.loss, clip=self.clip)


def trainer(s: Session, recipe: Recipe, batch: Batch) -> Trainer:
    """The parts that ``recipe`` names. ``batch`` is the plan's split of the global batch."""
    what = task(recipe)
    optim = recipe.optim
    model = s.parallelize(what.model, freeze=optim.freeze, unfreeze=[(u.step, u.modules) for u in optim.unfreeze])
    groups = s.parameter_groups(
        optim.name, weight_decay=optim.weight_decay, layer_decay=optim.layer_decay, lr_scale=optim.lr_scale
    )
    optimizer = s.optimizer(optim.name, groups, **registry.options(optim, text=recipe.is_text, device=s.device))
    data = s.loader(
        what.dataset,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        limits=what.limits,
        ragged=True,
    )
    if what.left_eval_mode:
        s._warn_eval_mode(what.left_eval_mode, switched=True)
    if s.is_main:
        describe.tell(what.dataset, what.validation, s._event)
    return Trainer(s, what, model, optimizer, data, what.loss, Clipping.of(recipe.optim))


def train(recipe: Recipe, batch: Batch) -> None:
    """Train to ``recipe.train.steps``."""
    total = recipe.train.steps
    with session() as s:
        t = trainer(s, recipe, batch)
        s.tokens_per_step = batch.global_batch * recipe.tokens_per_sample
        # What is observed is a validation metric, whatever the run is judged by.
        rising = recipe.higher_is_better and recipe.deciding_metric.startswith(PREFIX)
        rate = LearningRate(recipe.schedule, peak=recipe.optim.lr, total=total, higher_is_better=rising)
        evaluations = of_recipe(s, t.task, recipe, then=rate.observe)
        state = {"model": t.model, "optimizer": t.optimizer, "data": t.data, "schedule": rate}
        for step in s.steps(total, state, recipe.checkpoint.every, recipe.checkpoint.keep, evaluations):
            lr = rate.apply(t.optimizer, step + 1)
            done = t.step()
            s.log(loss=done.loss, lr=lr, grad_norm=done.grad_norm)

"""The built-in trainer: the session API with the recipe's model, data, optimizer and schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clustertrain import clock
from clustertrain.config.evaluation import VALIDATION_PREFIX
from clustertrain.config.huggingface import tensor_names
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch
from clustertrain.train.core.step_types import Loss, StepResult
from clustertrain.train.data import describe
from clustertrain.train.data.loader import Loader
from clustertrain.train.data.preferences import ANSWERS
from clustertrain.train.evaluation.best_metric import LOSS_METRIC
from clustertrain.train.evaluation.dataset_pass import DatasetPassConfig
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.models import losses
from clustertrain.train.models.build import TrainingTask, build_task, find_model_loss
from clustertrain.train.optim import registry
from clustertrain.train.optim.lr_schedule import LearningRate
from clustertrain.train.session.evaluation_api import compute_per_sample
from clustertrain.train.session.model_setup import report_eval_mode
from clustertrain.train.session.session import Session, get_runtime, session
from clustertrain.train.stability.clipping import Clipping


@dataclass(frozen=True)
class Trainer:
    """The parts of a training run that a recipe configures, in an open session."""

    session: Session
    task: TrainingTask
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LearningRate
    data: Loader
    loss: Loss
    clip: Clipping

    def step(self) -> StepResult:
        """Run one optimizer step on the next global batch."""
        return self.session.train_step(next(self.data), self.loss, clip=self.clip)


def build_trainer(session: Session, recipe: Recipe, batch: Batch) -> Trainer:
    """Build the parts that ``recipe`` names; ``batch`` is the plan's split of the global batch. Collective."""
    runtime = get_runtime(session)
    context = runtime.context
    training_task = build_task(recipe, shard=(context.data_rank, context.layout.data_parallel))
    optim = recipe.optim
    if recipe.model.init:
        names = {name: hf_name for name, (hf_name, _) in tensor_names.list_tensors(recipe.model).items()}
        session.load_pretrained(training_task.model, recipe.model.init, rename=names.__getitem__)
    model = session.parallelize(
        training_task.model, freeze=optim.freeze, unfreeze=[(u.step, u.modules) for u in optim.unfreeze]
    )
    groups = session.parameter_groups(
        optim.name, weight_decay=optim.weight_decay, layer_decay=optim.layer_decay, lr_scale=optim.lr_scale
    )
    options = registry.build_options(optim, is_text=recipe.is_text, device=session.device)
    optimizer = session.optimizer(optim.name, groups, **options)
    schedule = build_schedule(recipe, peak=options["lr"])
    data = session.loader(
        training_task.dataset,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        limits=training_task.limits,
        ragged=True,
    )
    if training_task.left_eval_mode:
        report_eval_mode(runtime, training_task.left_eval_mode, switched=True)
    if runtime.is_main:
        describe.report_datasets(training_task.dataset, training_task.validation, runtime.events.emit)
    return Trainer(
        session, training_task, model, optimizer, schedule, data, training_task.loss, Clipping.from_spec(recipe.optim)
    )


def build_schedule(recipe: Recipe, *, peak: float) -> LearningRate:
    """Return the recipe's learning rate schedule, which scales ``peak``."""
    # The schedule observes a validation metric, even if the deciding metric is not one.
    higher_is_better = recipe.higher_is_better and recipe.deciding_metric.startswith(VALIDATION_PREFIX)
    return LearningRate(recipe.schedule, peak=peak, total=recipe.train.steps, higher_is_better=higher_is_better)


def build_evaluations(
    session: Session, task: TrainingTask, recipe: Recipe, *, on_value: Callable[[float], None] | None = None
) -> EvaluationSchedule | None:
    """Return the recipe's evaluation schedule, or None without validation data.

    Args:
        on_value: called with the metric's value after each evaluation.

    Raises:
        ConfigError: the validation data is empty.
    """
    if task.validation is None:
        return None
    spec, metric = recipe.evaluation, recipe.deciding_metric
    is_validation_metric = metric.startswith(VALIDATION_PREFIX)
    # The inputs of a loss that the model computes itself are unknown, so no metric is added to the recipe's.
    has_model_loss = find_model_loss(recipe, task.model) is not None
    return session.evaluations(
        task.validation,
        task.loss,
        every=recipe.evaluation_interval,
        metric=metric if is_validation_metric else LOSS_METRIC,
        higher_is_better=is_validation_metric and recipe.higher_is_better,
        patience=spec.patience,
        warn_when_rising=spec.warn_when_rising,
        slices=recipe.contract.slices,
        on_value=on_value,
        metrics=spec.metrics if has_model_loss else recipe.evaluated_metrics,
        micro_batch=spec.micro_batch or None,
        samples=spec.samples,
        workers=recipe.data.workers,
        group=recipe.model.two_tower.group if recipe.model.kind == "two-tower" else 1,
        ignore_index=recipe.objective.ignore_index,
        limits=task.limits,
    )


def compute_reference(trainer: Trainer, recipe: Recipe) -> None:
    """Compute the log-probabilities of all answers under the current weights; stop early if the ranks have agreed to
    stop. Collective."""
    runtime = get_runtime(trainer.session)
    assert trainer.task.reference is not None
    started, sequences = clock.monotonic(), 0
    compute = functools.partial(_sum_target_log_probs, ignore_index=recipe.objective.ignore_index)
    config = DatasetPassConfig(
        trainer.data.micro_batch, workers=max(0, recipe.data.workers), limits=trainer.task.limits
    )
    for pairs in trainer.task.reference.datasets:
        values = compute_per_sample(runtime, trainer.model, pairs, compute, ANSWERS, config)
        if values is None:
            return
        pairs.set_reference(values)
        sequences += values.numel()
    reference_s = clock.monotonic() - started
    runtime.events.emit("reference_computed", answers=sequences, reference_s=reference_s)
    if runtime.is_main:
        print(f"reference: log-probabilities of {sequences} answers in {reference_s:.1f} s", flush=True)


def _sum_target_log_probs(logits: torch.Tensor, target: Any, *, ignore_index: int) -> torch.Tensor:
    return losses.sum_log_probs(logits, target[0], ignore_index)


def train(recipe: Recipe, batch: Batch) -> None:
    """Train until ``recipe.train.steps`` steps are done."""
    total = recipe.train.steps
    with session() as s:
        trainer = build_trainer(s, recipe, batch)
        s.tokens_per_step = batch.global_batch * recipe.tokens_per_sample
        evaluations = build_evaluations(s, trainer.task, recipe, on_value=trainer.schedule.observe)
        state = {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "data": trainer.data,
            "schedule": trainer.schedule,
        }
        if trainer.task.reference is not None:
            state["reference"] = trainer.task.reference
            get_runtime(s).state.prepare_start = functools.partial(compute_reference, trainer, recipe)
        for step in s.steps(total, state, recipe.checkpoint.every, recipe.checkpoint.keep, evaluations):
            trainer.schedule.apply(trainer.optimizer, step + 1)
            result = trainer.step()
            s.log(loss=result.loss, grad_norm=result.grad_norm)

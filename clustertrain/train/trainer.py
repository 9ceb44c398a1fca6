"""The built-in trainer: the session API with the recipe's model, data, optimizer and schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.format import model_tensors
from clustertrain.config.checks.epochs import has_epoch_keys, list_epoch_keys
from clustertrain.config.evaluation import VALIDATION_PREFIX
from clustertrain.config.huggingface import tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, NotFound
from clustertrain.plan.layout import Batch
from clustertrain.train.core.step_types import Loss, StepResult
from clustertrain.train.data import describe
from clustertrain.train.data.loader import Loader
from clustertrain.train.data.preferences import ANSWERS
from clustertrain.train.data.streams.source import StreamSource
from clustertrain.train.distributed import attention_kernels
from clustertrain.train.evaluation.best_metric import LOSS_METRIC
from clustertrain.train.evaluation.dataset_pass import DatasetPassConfig
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.models import losses
from clustertrain.train.models.build import TrainingTask, build_task, find_model_loss
from clustertrain.train.models.decoder import Decoder
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
    load_weights(session, recipe.model, training_task.model)
    if recipe.adapter.is_enabled:
        _add_adapters(session, recipe, training_task.model)
    model = session.parallelize(
        training_task.model, freeze=optim.freeze, unfreeze=[(u.step, u.modules) for u in optim.unfreeze]
    )
    groups = session.parameter_groups(
        optim.name,
        weight_decay=optim.weight_decay,
        layer_decay=optim.layer_decay,
        lr_scale=optim.lr_scale,
        weight_decay_scale=optim.weight_decay_scale,
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
        kernel = attention_kernels.find_document_kernel(recipe, runtime.context)
        describe.report_datasets(
            training_task.dataset,
            training_task.validation,
            runtime.events.emit,
            kernel.describe() if kernel is not None else None,
        )
    return Trainer(
        session, training_task, model, optimizer, schedule, data, training_task.loss, Clipping.from_spec(recipe.optim)
    )


def load_weights(session: Session, spec: ModelSpec, model: nn.Module) -> None:
    """Have ``session`` load the weights that ``model`` starts from, if the recipe names some. Collective.

    Raises:
        NotFound: a file is missing.
        ConfigError: a file is damaged, its tensors are not those of the module, or there is no such module.
    """
    modules = dict(model.named_modules())
    for name, path in spec.weight_files.items():
        if name not in modules:
            raise ConfigError(
                f"model.init_parts: {spec.entry} has no module {name!r}",
                fix=did_you_mean(name, [m for m in modules if m]),
            )
        module = modules[name]
        # The decoder has Hugging Face's names in files, unless these were exported with --names own.
        is_own = not isinstance(module, Decoder) or _has_own_names(module, Path(path))
        names = {} if is_own else {own: hf for own, (hf, _) in tensor_names.list_tensors(module.spec).items()}
        session.load_pretrained(module, path, rename=lambda own, names=names: names.get(own, own))  # type: ignore[misc]


def _has_own_names(module: nn.Module, path: Path) -> bool:
    try:
        return not model_tensors.read_weights(path).tensors.keys().isdisjoint(module.state_dict())
    except NotFound:  # a run that resumes does not need the files
        return False


def _add_adapters(session: Session, recipe: Recipe, model: nn.Module) -> None:
    spec = recipe.adapter
    rename = tensor_names.rename_layer(recipe.model) if recipe.model.is_decoder else None
    session.add_adapters(
        model,
        spec.target_modules,
        kind="dora" if spec.kind == "dora" else "lora",
        rank=spec.rank,
        alpha=spec.alpha,
        rank_stabilized=spec.rank_stabilized,
        dropout=spec.dropout,
        base_precision=spec.base_precision,
        init=spec.init,
        rename=rename,
    )


def check_epoch_size(recipe: Recipe, samples: int) -> None:
    """Raise ConfigError if the keys in epochs were resolved for another number of training samples."""
    if has_epoch_keys(recipe) and samples != recipe.data.samples:
        raise ConfigError(
            f"{' and '.join(list_epoch_keys(recipe))}: the steps were computed for data.samples ="
            f" {recipe.data.samples}, but the training data has {samples}",
            fix="correct or remove data.samples, or submit again if the data has changed",
        )


def build_schedule(recipe: Recipe, *, peak: float) -> LearningRate:
    """Return the recipe's learning rate schedule, which scales ``peak``."""
    # The schedule observes a validation metric, even if the deciding metric is not one.
    higher_is_better = recipe.higher_is_better and recipe.deciding_metric.startswith(VALIDATION_PREFIX)
    spec = msgspec.structs.replace(recipe.schedule, cycle_momentum=recipe.cycles_momentum)
    return LearningRate(spec, peak=peak, total=recipe.train.steps, higher_is_better=higher_is_better)


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
        group=max(1, recipe.objective.group) if recipe.objective_kind == "nt-xent" else 1,
        ignore_index=recipe.objective.ignore_index,
        save_predictions=spec.save_predictions,
        limits=task.limits,
    )


def compute_reference(trainer: Trainer, recipe: Recipe) -> None:
    """Compute the log-probabilities of all answers under the current weights; stop early if the ranks have agreed to
    stop. Collective."""
    runtime = get_runtime(trainer.session)
    assert trainer.task.reference is not None
    started, sequences = clock.monotonic(), 0
    compute = functools.partial(_sum_target_log_probs, ignore_index=recipe.objective.ignore_index)
    config = DatasetPassConfig(trainer.data.micro_batch, workers=recipe.data.workers, limits=trainer.task.limits)
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
        if not isinstance(trainer.task.dataset, StreamSource):
            check_epoch_size(recipe, len(trainer.task.dataset))
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
            momentum = trainer.schedule.momentum_at(step + 1)
            if momentum is not None:
                s.log(momentum=momentum)

"""Evaluation inside a session: ``Session.evaluate`` and the timing of an evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from clustertrain import clock
from clustertrain.errors import ConfigError, UsageError
from clustertrain.run import heartbeat
from clustertrain.train.core.step_types import Loss
from clustertrain.train.data.loader import MapStyleDataset
from clustertrain.train.evaluation import predictions
from clustertrain.train.evaluation.dataset_pass import DatasetPassConfig, build_dataset_pass, build_pass
from clustertrain.train.evaluation.evaluator import Evaluator, find_slices
from clustertrain.train.evaluation.metrics import MetricFn, build_metrics
from clustertrain.train.evaluation.predictions import PredictionRecorder
from clustertrain.train.models.contrastive import compares_batch
from clustertrain.train.profiling import compile_trial
from clustertrain.train.session.runtime import SessionRuntime

DEFAULT_MICRO_BATCH = 8  # without a plan and without a loader


@dataclass(frozen=True)
class MeasureOptions:
    """What an evaluation measures; see ``Session.evaluate``."""

    metrics: Sequence[str] | Mapping[str, MetricFn] = ()
    slices: Sequence[str] = ()
    ignore_index: int = -100
    save_predictions: int = 0
    keep_steps: Callable[[], Collection[int]] = tuple
    """Returns the steps whose predictions are kept, in addition to those of this evaluation."""


@contextmanager
def timed_evaluation(runtime: SessionRuntime) -> Iterator[None]:
    """Report the time of the block as evaluation, not as training."""
    t_begin, started = clock.now(), clock.monotonic()
    try:
        with runtime.progress.in_phase(heartbeat.EVALUATION):
            yield
    finally:
        eval_s = clock.monotonic() - started
        runtime.metrics_processor.exclude_time(eval_s)
        runtime.events.emit("evaluation", step=runtime.state.step, t_begin=t_begin, eval_s=eval_s)


def evaluate(
    runtime: SessionRuntime,
    model: nn.Module,
    data: MapStyleDataset | Iterable[object],
    loss_fn: Loss,
    pass_config: DatasetPassConfig,
    options: MeasureOptions,
) -> dict[str, float]:
    """Return the mean loss and metrics of ``model`` over ``data``, also kept as the current step's. Collective.

    Raises:
        ConfigError: ``data`` is empty, a metric or slice is unknown, the outputs do not fit a metric, or the layout
            splits the predictions to save.
    """
    metrics = build_metrics(options.metrics)
    group = pass_config.group
    if compares_batch(loss_fn):
        if not hasattr(data, "__getitem__"):
            raise UsageError(
                "evaluate: the loss compares samples of all ranks, and batches do not show which samples are adjacent",
                fix="pass the dataset itself",
            )
        group = group if group > 1 else _default_group(runtime)
        pass_config = replace(pass_config, group=1)
    slices = find_slices(data, options.slices, group)
    batches = build_pass(data, pass_config, runtime.context, runtime.seed, runtime.agreement.any_rank)
    evaluator = Evaluator(model, runtime.context, runtime.groups, runtime.agreement.poll)
    recorder = _build_recorder(runtime, evaluator, data, options)
    with timed_evaluation(runtime), _eager_layers(runtime, model):
        results = evaluator(batches, loss_fn, metrics, slices, options.ignore_index, recorder, group)
        if recorder is not None and results and runtime.context.run is not None:
            folder, context = runtime.context.run.predictions, runtime.context
            if recorder.write(folder, context.rank, options.keep_steps(), runtime.state.step):
                path = predictions.step_folder(folder, runtime.state.step)
                runtime.events.emit("predictions_saved", step=runtime.state.step, path=str(path))
    runtime.state.eval_results = results or {}
    return dict(runtime.state.eval_results)


def _build_recorder(
    runtime: SessionRuntime, evaluator: Evaluator, data: object, options: MeasureOptions
) -> PredictionRecorder | None:
    if not options.save_predictions or runtime.context.run is None:
        return None
    if isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise UsageError(
            "session.evaluate: save_predictions names samples by their index in a dataset, and batches have none",
            fix="pass the dataset instead of a loader",
        )
    if runtime.context.layout.cp > 1:
        raise ConfigError(
            f"evaluation.save_predictions with cp {runtime.context.layout.cp}: each rank has a part of every sequence",
            fix="set it to 0, or use cp = 1",
        )
    return PredictionRecorder(
        options.save_predictions,
        ignore_index=options.ignore_index,
        counts=evaluator.counts_results,
        confusion=not evaluator.is_pipelined,
    )


def _default_group(runtime: SessionRuntime) -> int:
    """Return the global batch of training, or a number that no dataset reaches if it is unknown."""
    if runtime.context.batch is not None and runtime.context.batch.global_batch:
        return runtime.context.batch.global_batch
    return runtime.loaders[0].global_batch if runtime.loaders else sys.maxsize


def compute_per_sample(
    runtime: SessionRuntime,
    model: nn.Module,
    dataset: MapStyleDataset,
    compute: Callable[[Any, Any], torch.Tensor],
    width: int,
    pass_config: DatasetPassConfig,
) -> torch.Tensor | None:
    """Return ``compute(output, target)``, (batch, width), of every sample, (samples, width) in fp32 on the CPU; None if
    the ranks agreed to stop. Collective.

    Raises:
        ConfigError: ``dataset`` is empty.
    """
    batches = build_dataset_pass(dataset, pass_config, runtime.context, runtime.seed)
    evaluator = Evaluator(model, runtime.context, runtime.groups, runtime.agreement.poll)
    with timed_evaluation(runtime), _eager_layers(runtime, model):
        return evaluator.compute_per_sample(batches, compute, width)


def _eager_layers(runtime: SessionRuntime, model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which layers whose compilation was not tried yet are not compiled."""
    train_step = runtime.state.train_step
    is_compile_untried = train_step is not None and train_step.is_compile_untried
    return compile_trial.eager_layers(model) if is_compile_untried else nullcontext()


def default_micro_batch(runtime: SessionRuntime) -> int:
    """Return the micro-batch used in training, or :data:`DEFAULT_MICRO_BATCH` if it is unknown."""
    if runtime.context.batch is not None and runtime.context.batch.micro_batch:
        return runtime.context.batch.micro_batch
    return runtime.loaders[0].micro_batch if runtime.loaders else DEFAULT_MICRO_BATCH

"""The verbs of a session that measure the model on data it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from clustertrain import clock
from clustertrain.errors import UsageError
from clustertrain.run import heartbeat
from clustertrain.train.core.step_types import Loss
from clustertrain.train.data.loader import MapStyleDataset
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.dataset_pass import DatasetPassConfig, build_pass
from clustertrain.train.evaluation.evaluator import Evaluator, find_slices
from clustertrain.train.evaluation.metrics import MetricFn, build_metrics
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.profiling import compile_trial
from clustertrain.train.session.runtime import SessionRuntime

DEFAULT_MICRO_BATCH = 8  # where nothing else tells


class EvaluationMixin(SessionRuntime):
    """A session as far as it evaluates."""

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation: its time is reported apart from the steps'."""
        t_begin, started = clock.now(), clock.monotonic()
        try:
            with self._progress.in_phase(heartbeat.EVALUATION):
                yield
        finally:
            eval_s = clock.monotonic() - started
            self._metrics_processor.exclude_time(eval_s)
            self._emit_event("evaluation", step=self.step, t_begin=t_begin, eval_s=eval_s)

    def evaluate(
        self,
        data: MapStyleDataset | Iterable[Any],
        loss_fn: Loss,
        *,
        metrics: Sequence[str] | Mapping[str, MetricFn] = (),
        micro_batch: int | None = None,
        samples: int = 0,
        workers: int = 0,
        slices: Sequence[str] = (),
        group: int = 1,
        ignore_index: int = -100,
        limits: Limits | None = None,
        model: nn.Module | None = None,
    ) -> dict[str, float]:
        """``validation_loss`` and other means over ``data``, floats that are equal on all ranks and under every layout;
        of a slice ``validation_loss/NAME``. Nothing is changed by it. Collective. Empty where the ranks have agreed to
        stop: :meth:`steps` then ends the process.

        Args:
            data: a data set, of which each data-parallel rank takes its part in order; or batches (inputs, target) of
                this rank's own, the same on ranks that share them.
            loss_fn: as for :meth:`train_step`.
            metrics: names of ``evaluation.metrics``, or functions (output, target) -> (sum, count) by name.
            micro_batch: samples a rank and forward pass; default: as in training, and without a loader 8.
            samples: at most so many; 0: all.
            workers: processes that read ahead; 0: the rank itself reads.
            slices: those of the data set to tell apart; default: all that it names.
            group: neighbouring samples that are compared with each other, by a contrastive loss say.
            ignore_index: targets that the metrics leave out.
            limits: what the model takes: a sample that is not so is named.
            model: default: what :meth:`parallelize` returned.

        Raises:
            UsageError: no model.
            ConfigError: nothing to evaluate on, an unknown metric or slice, outputs that a metric cannot be told of.
        """
        model = self._model if model is None else model
        if model is None:
            raise UsageError("session.evaluate: call session.parallelize(model) first, or give model=...")
        eval_metrics = build_metrics(metrics)
        eval_slices = find_slices(data, slices, group)
        pass_config = DatasetPassConfig(micro_batch or self._default_micro_batch(), samples, workers, group, limits)
        batches = build_pass(data, pass_config, self._context, self.seed, self._agreement.any_rank)
        evaluator = Evaluator(model, self._context, self._groups, self._agreement.poll)
        is_compile_untried = self._train_step is not None and self._train_step.is_compile_untried
        with self.evaluation(), compile_trial.eager_layers(model) if is_compile_untried else nullcontext():
            results = evaluator(batches, loss_fn, eval_metrics, eval_slices, ignore_index)
        self._eval_results = results or {}
        return dict(self._eval_results)

    def _default_micro_batch(self) -> int:
        if self._context.batch is not None and self._context.batch.micro_batch:
            return self._context.batch.micro_batch
        return self._loaders[0].micro_batch if self._loaders else DEFAULT_MICRO_BATCH

    def evaluations(
        self,
        data: MapStyleDataset | Iterable[Any],
        loss_fn: Loss,
        *,
        every: int,
        metric: str = "validation_loss",
        higher_is_better: bool = False,
        patience: int = 0,
        rising: int = 3,
        slices: Sequence[str] = (),
        then: Callable[[float], None] | None = None,
        **options: Any,
    ) -> EvaluationSchedule:
        """Evaluations every ``every`` steps and at the end, for :meth:`steps`, which logs them with their step, keeps
        the best checkpoint by ``metric``, and ends the run after ``patience`` of them without a better one.

        Args:
            rising: so many evaluations in a row with a rising loss are worth a warning; 0: none.
            slices: where a regression is not acceptable: told with their best value.
            then: told the value of ``metric``: ``LearningRate.observe``.
            options: what :meth:`evaluate` takes.

        Raises:
            UsageError: ``every`` is below 1.
        """
        early_stopping = EarlyStopping(
            metric, higher_is_better=higher_is_better, patience=patience, rising_limit=rising, slices=slices
        )
        return EvaluationSchedule(
            lambda: self.evaluate(data, loss_fn, slices=slices, **options),
            every=every,
            early_stopping=early_stopping,
            on_value=then,
        )

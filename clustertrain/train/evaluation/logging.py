"""Reporting of evaluations: events, a warning, and the metrics row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from clustertrain import clock
from clustertrain.run import metrics, metrics_file
from clustertrain.train.core.context import RankContext
from clustertrain.train.evaluation.schedule import EvaluationSchedule

log = logging.getLogger(__name__)

# Keys of a row that hold only for the attempt that trained the step.
_STEP_TIMING_KEYS = ("step_s", "tokens_per_s", "data_wait_s")


def report_evaluation(
    evaluations: EvaluationSchedule, step: int, emit_event: Callable[..., None], *, to_log: bool
) -> None:
    """Emit the outcome of the latest evaluation, made after ``step`` steps."""
    early_stopping, outcome = evaluations.early_stopping, evaluations.last_outcome
    assert outcome is not None
    emit_event(
        "evaluated",
        step=step,
        metric=early_stopping.metric,
        higher_is_better=early_stopping.higher_is_better,
        value=outcome.value,
        best=early_stopping.best,
        best_step=early_stopping.best_step,
        slices=early_stopping.slices,
    )
    if outcome.num_rising:
        text = f"validation_loss has risen for {outcome.num_rising} evaluations in a row"
        fix = (
            "stop early (evaluation.patience), or use more data, augmentation, weight decay or dropout against "
            "overfitting; the best checkpoint is kept"
        )
        emit_event(
            "training_warning",
            code="validation_rising",
            step=step,
            text=text,
            fix=fix,
            value=outcome.num_rising,
            limit=early_stopping.rising_limit,
        )
        if to_log:
            log.warning("step %d: %s; %s", step, text, fix)
    if evaluations.stop_reason and to_log:
        log.warning("step %d: %s", step, evaluations.stop_reason)


def load_previous_row(context: RankContext, step: int) -> dict[str, Any]:
    """Return the row of ``step`` from the attempt that trained it, without its timings."""
    previous: dict[str, Any] = {}
    if context.rank == 0 and context.run is not None and context.attempt is not None:
        earlier_attempts = range(1, context.attempt.n)
        for path in reversed([path for n in earlier_attempts for path in context.run.metrics_files(n)]):
            row = metrics_file.find_row_at(path, step)
            if row is not None and row["step"] == step:
                previous = row
                break
    excluded = (*_STEP_TIMING_KEYS, *metrics.CUT_SHORT)
    retained = {k: v for k, v in previous.items() if k not in excluded and not k.startswith("sum_")}
    return {**retained, "step": step, "t": clock.now()}

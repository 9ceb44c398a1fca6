"""What an evaluation leaves behind for people: events, a warning, a row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from clustertrain import clock
from clustertrain.run import metrics, metrics_file
from clustertrain.train.core.context import RankContext
from clustertrain.train.evaluation.schedule import Evaluations

log = logging.getLogger(__name__)

# Of a row, what belongs to the attempt that has done the step.
_OF_THE_STEP = ("step_s", "tokens_per_s", "data_wait_s")


def of(evaluations: Evaluations, step: int, event: Callable[..., None], *, aloud: bool) -> None:
    """Tell what the newest evaluation, made after ``step`` steps, says of the run."""
    judge, found = evaluations.judge, evaluations.newest
    assert found is not None
    event(
        "judged",
        step=step,
        metric=judge.metric,
        higher_is_better=judge.higher_is_better,
        value=found.value,
        best=judge.best,
        best_step=judge.best_step,
        slices=judge.slices,
    )
    if found.rising:
        text = f"validation_loss has risen for {found.rising} evaluations in a row"
        fix = (
            "the model learns what does not carry over: stop early (evaluation.patience), or use more data, "
            "augmentation, weight decay or dropout; the best checkpoint is kept"
        )
        event(
            "training_warning",
            code="validation_rising",
            step=step,
            text=text,
            fix=fix,
            value=found.rising,
            limit=judge.rising_limit,
        )
        if aloud:
            log.warning("step %d: %s; %s", step, text, fix)
    if evaluations.over and aloud:
        log.warning("step %d: %s", step, evaluations.over)


def row_before(context: RankContext, step: int) -> dict[str, Any]:
    """The row of ``step`` as the attempt has told it that did the step, without what it measured of itself."""
    found: dict[str, Any] = {}
    if context.rank == 0 and context.run is not None and context.attempt is not None:
        before = range(1, context.attempt.n)
        for path in reversed([path for n in before for path in context.run.metrics_files(n)]):
            row = metrics_file.at(path, step)
            if row is not None and row["step"] == step:
                found = row
                break
    left_out = (*_OF_THE_STEP, *metrics.CUT_SHORT)
    kept = {k: v for k, v in found.items() if k not in left_out and not k.startswith("sum_")}
    return {**kept, "step": step, "t": clock.now()}

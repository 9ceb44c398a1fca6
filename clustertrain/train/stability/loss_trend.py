"""The loss trend on rank 0: whether it falls, oscillates or levels off, and its gap to the validation loss."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from clustertrain.config.evaluation import VALIDATION_PREFIX

GAP_COLUMN = "generalization_gap"  # validation loss - training loss of the same step
VALIDATION_LOSS = f"{VALIDATION_PREFIX}loss"
FIRST_STEPS = 20  # steps that give the loss at the start of the run
WINDOW_STEPS = 50
MIN_STEADY_STEPS = 100  # steps since the learning rate last rose: during warmup a loss may well be flat
MIN_FALL = 0.01  # of the first loss: less is flat
MAX_SWING = 0.3  # robust standard deviation of recent losses, relative to their median
HIGH_LOSS = 0.7  # of the first loss: as much is left after the loss leveled off
GAP_EVALUATIONS = 3  # consecutive evaluations with a widening gap
MIN_GAP = 0.2  # of the validation loss
LEVEL_EVALUATIONS, MAX_LEVEL_CHANGE = 4, 0.01  # evaluations, and the relative change of both losses over them
_MAD_TO_STD = 1.4826  # for a normal distribution


class Finding(NamedTuple):
    """A property of the loss trend."""

    code: str
    text: str
    fix: str
    value: float
    limit: float


class _Evaluation(NamedTuple):
    train: float
    validation: float


class LossTrend:
    """Rows of one attempt. A resumed attempt does not know the loss at the start, so it reports only the gap.

    Findings compare the validation loss with the mean training loss since the evaluation before. The column uses the
    step's own loss, so that a resumed run writes the same rows.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._knows_start: bool | None = None
        self._recent: deque[float] = deque(maxlen=2 * WINDOW_STEPS)
        self._steady_steps = 0
        self._last_lr = math.inf
        self._since_evaluation: list[float] = []
        self._evaluations: deque[_Evaluation] = deque(maxlen=max(GAP_EVALUATIONS + 1, LEVEL_EVALUATIONS))

    @staticmethod
    def add_gap(row: dict[str, Any]) -> None:
        """Add the generalization gap to the row of an evaluation, before the row is written."""
        loss, validation = _as_finite(row.get("loss")), _as_finite(row.get(VALIDATION_LOSS))
        if validation is not None and loss is not None:
            row[GAP_COLUMN] = validation - loss

    def observe(self, row: Mapping[str, Any]) -> Iterator[Finding]:
        """Yield what the row of a step shows of the loss trend."""
        loss, lr = _as_finite(row.get("loss")), _as_finite(row.get("lr"))
        if self._knows_start is None:
            self._knows_start = int(row["step"]) <= 1
        if loss is not None and not row.get("skipped"):
            self._since_evaluation.append(loss)
            self._recent.append(loss)
            if len(self._first) < FIRST_STEPS:
                self._first.append(loss)
            self._steady_steps = self._steady_steps + 1 if lr is not None and lr <= self._last_lr else 0
        if lr is not None:
            self._last_lr = lr
        if self._is_course_known():
            yield from self._judge_course()
        validation = _as_finite(row.get(VALIDATION_LOSS))
        if validation is not None and self._since_evaluation:
            self._evaluations.append(_Evaluation(statistics.fmean(self._since_evaluation), validation))
            self._since_evaluation.clear()
            yield from self._judge_evaluations()

    def _is_course_known(self) -> bool:
        is_full = len(self._recent) == self._recent.maxlen and self._steady_steps >= MIN_STEADY_STEPS
        return bool(self._knows_start) and is_full and self._first_loss != 0

    @property
    def _first_loss(self) -> float:
        return statistics.median(self._first)

    def _judge_course(self) -> Iterator[Finding]:
        """Yield a finding if the loss has not fallen, or oscillates without falling."""
        first, recent = self._first_loss, list(self._recent)
        before, now = statistics.median(recent[:WINDOW_STEPS]), statistics.median(recent[WINDOW_STEPS:])
        spread = _MAD_TO_STD * statistics.median(abs(loss - now) for loss in recent[WINDOW_STEPS:])
        swing, fall = spread / abs(now) if now else 0.0, (first - now) / abs(first)
        has_stopped = now > before - MIN_FALL * abs(before) and now > first - abs(first) / 2
        if swing > MAX_SWING and has_stopped:
            yield Finding(
                "loss_oscillating",
                f"the loss oscillates by {swing:.0%} around {now:.4g} and does not fall",
                "lower the learning rate (`clustertrain diagnose lr-range` finds a suitable one), lengthen warmup or "
                "enlarge train.global_batch",
                swing,
                MAX_SWING,
            )
        elif abs(fall) < MIN_FALL:
            yield Finding(
                "loss_flat",
                f"the loss has not fallen: {first:.4g} in the first {FIRST_STEPS} steps, {now:.4g} in the last"
                f" {WINDOW_STEPS}",
                "raise the learning rate if `clustertrain diagnose lr-range` finds a higher one; otherwise check that "
                "the targets belong to their inputs (`clustertrain diagnose data`) and that the parameters "
                "are not frozen",
                fall,
                MIN_FALL,
            )

    def _judge_evaluations(self) -> Iterator[Finding]:
        """Yield a finding if the gap widens, or if both losses have leveled off at a high value."""
        evaluations = list(self._evaluations)
        last = evaluations[-1]
        gaps = [e.validation - e.train for e in evaluations][-GAP_EVALUATIONS - 1 :]
        is_widening = len(gaps) > GAP_EVALUATIONS and all(a < b for a, b in itertools.pairwise(gaps))
        if is_widening and gaps[-1] > MIN_GAP * abs(last.validation):
            yield Finding(
                "gap_widening",
                f"the gap between validation loss ({last.validation:.4g}) and training loss ({last.train:.4g}) has"
                f" widened for {GAP_EVALUATIONS} evaluations: the model overfits the training data",
                "use more data, augmentation, weight decay or dropout, or a smaller model; evaluation.patience ends "
                "the run once the validation loss no longer improves",
                gaps[-1] / abs(last.validation),
                MIN_GAP,
            )
        levels = evaluations[-LEVEL_EVALUATIONS:]
        if not self._knows_start or len(levels) < LEVEL_EVALUATIONS or self._steady_steps < MIN_STEADY_STEPS:
            return
        first = self._first_loss
        is_level = all(_relative_fall(values) < MAX_LEVEL_CHANGE for values in zip(*levels, strict=True))
        has_fallen = (first - last.train) / abs(first) >= MIN_FALL if first else False
        if is_level and has_fallen and min(last) > HIGH_LOSS * first > 0:
            yield Finding(
                "underfitting",
                f"training loss ({last.train:.4g}) and validation loss ({last.validation:.4g}) have leveled off near"
                f" the first loss, {first:.4g}: the model fits neither",
                "use a larger model, a higher learning rate or less weight decay, dropout and augmentation; check that "
                "the inputs determine the targets (`clustertrain diagnose overfit`)",
                min(last) / first,
                HIGH_LOSS,
            )


def _relative_fall(values: tuple[float, ...]) -> float:
    return (values[0] - values[-1]) / abs(values[0]) if values[0] else 0.0


def _as_finite(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None

"""Tracking of evaluation results: the best value, early stopping, and a rising loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertrain.config.evaluation import SLICE_SEPARATOR, VALIDATION_PREFIX
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError

LOSS_METRIC = f"{VALIDATION_PREFIX}loss"


@dataclass(frozen=True)
class EvalOutcome:
    """Outcome of one evaluation."""

    value: float
    is_best: bool
    num_rising: int = 0
    """Consecutive evaluations with a rising loss, if that number calls for a warning; otherwise 0."""
    stop_reason: str = ""
    """Why the run should end now; empty if it should not."""


class EarlyStopping:
    """Best value and patience of the deciding metric, equal on all ranks, as its inputs are; saved in checkpoints."""

    def __init__(
        self,
        metric: str = LOSS_METRIC,
        *,
        higher_is_better: bool = False,
        patience: int = 0,
        rising_limit: int = 0,
        slices: Sequence[str] = (),
    ) -> None:
        self.metric = metric
        self.higher_is_better = higher_is_better
        self._patience = patience
        self.rising_limit = rising_limit
        self._slices = tuple(slices)
        self.init_fresh_state()

    def best_steps(self) -> tuple[int, ...]:
        """Return the step with the best value, if there is one."""
        return () if self.best_step is None else (self.best_step,)

    def init_fresh_state(self) -> None:
        self.best: float | None = None
        """Best value of the deciding metric; None before the first."""
        self.best_step: int | None = None
        """Step of the best value."""
        self.slices: dict[str, dict[str, float]] = {}
        """Latest ("value") and best ("best") value of each slice that the contract names."""
        self._evals_since_best = 0
        self._num_rising = 0
        self._last_loss = math.inf

    def observe(self, step: int, results: Mapping[str, float]) -> EvalOutcome:
        """Record the results of the evaluation after ``step``.

        Raises:
            ConfigError: the deciding metric is not among the results.
        """
        value = self._get_value(results)
        is_best = self._is_better(value, self.best)
        if is_best:
            self.best, self.best_step, self._evals_since_best = value, step, 0
        else:
            self._evals_since_best += 1
        self._update_slices(results)
        return EvalOutcome(value, is_best, self._count_rising(results), self._stop_reason())

    def _get_value(self, results: Mapping[str, float]) -> float:
        if self.metric not in results:
            raise ConfigError(
                f"contract.metric = {self.metric!r} is not produced by the evaluation; available: {', '.join(results)}",
                fix=did_you_mean(self.metric, list(results)),
            )
        return results[self.metric]

    def _is_better(self, value: float, best: float | None) -> bool:
        if not math.isfinite(value):
            return False
        if best is None or not math.isfinite(best):
            return True
        return value > best if self.higher_is_better else value < best

    def _update_slices(self, results: Mapping[str, float]) -> None:
        base = self.metric.partition(SLICE_SEPARATOR)[0]
        for name in self._slices:
            value = results.get(f"{base}{SLICE_SEPARATOR}{name}")
            if value is None:
                continue
            previous_best = self.slices.get(name, {}).get("best")
            best = value if self._is_better(value, previous_best) or previous_best is None else previous_best
            self.slices[name] = {"value": value, "best": best}

    def _count_rising(self, results: Mapping[str, float]) -> int:
        """Return the number of consecutive rises if it is a multiple of the limit, otherwise 0."""
        loss = results.get(LOSS_METRIC, math.nan)
        self._num_rising = self._num_rising + 1 if not loss <= self._last_loss else 0  # NaN counts as rising
        self._last_loss = loss if math.isfinite(loss) else self._last_loss
        should_warn = self.rising_limit > 0 and self._num_rising > 0 and self._num_rising % self.rising_limit == 0
        return self._num_rising if should_warn else 0

    def _stop_reason(self) -> str:
        if not self._patience or self._evals_since_best < self._patience:
            return ""
        best = "none yet" if self.best is None else f"{self.best:.6g} at step {self.best_step}"
        return (
            f"early stop: {self.metric} has not improved for {self._evals_since_best} evaluations"
            f" (evaluation.patience = {self._patience}); best: {best}"
        )

    def forget_best(self, remaining: Mapping[int, float]) -> None:
        """Replace the best value, whose checkpoint is gone, with the best of ``remaining`` (value by step)."""
        sign = -1.0 if self.higher_is_better else 1.0
        self.best_step = min(remaining, key=lambda step: (sign * remaining[step], -step), default=None)
        self.best = None if self.best_step is None else remaining[self.best_step]

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "best": self.best,
            "best_step": self.best_step,
            "slices": self.slices,
            "waited": self._evals_since_best,
            "rising": self._num_rising,
            "last_loss": None if math.isinf(self._last_loss) else self._last_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the best value only if it belongs to the same metric."""
        if state["metric"] == self.metric:
            self.best, self.best_step, self._evals_since_best = state["best"], state["best_step"], int(state["waited"])
            self.slices = {name: dict(values) for name, values in state["slices"].items() if name in self._slices}
        self._num_rising = int(state["rising"])
        self._last_loss = math.inf if state["last_loss"] is None else float(state["last_loss"])

"""What evaluations say of the run: the best so far, whether it still gets better, where it gets worse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertrain.config.evaluation import PREFIX, SLICE
from clustertrain.config.parsing import nearest
from clustertrain.errors import ConfigError

LOSS = f"{PREFIX}loss"


@dataclass(frozen=True)
class Verdict:
    """Of one evaluation. ``rising``: the loss has risen for as many evaluations in a row as are worth a warning."""

    value: float
    better: bool
    rising: int = 0
    enough: str = ""  # why the run should end now


class Judge:
    """The same on all ranks, as what it is told is. Its state is in the checkpoint.

    ``best`` and ``best_step`` are of the deciding metric, None before there is one; ``slices`` has by name the newest
    and the best value of each slice that the contract names.
    """

    def __init__(
        self,
        metric: str = LOSS,
        *,
        higher_is_better: bool = False,
        patience: int = 0,
        rising: int = 0,
        slices: Sequence[str] = (),
    ) -> None:
        self.metric = metric
        self.higher_is_better = higher_is_better
        self._patience = patience
        self.rising_limit = rising
        self._slices = tuple(slices)
        self.begin_anew()

    def begin_anew(self) -> None:
        self.best: float | None = None
        self.best_step: int | None = None
        self.slices: dict[str, dict[str, float]] = {}
        self._waited = 0
        self._rising = 0
        self._last_loss = math.inf

    def observe(self, step: int, results: Mapping[str, float]) -> Verdict:
        """
        Raises:
            ConfigError: the deciding metric is not among the results.
        """
        value = self._value(results)
        better = self._is_better(value, self.best)
        if better:
            self.best, self.best_step, self._waited = value, step, 0
        else:
            self._waited += 1
        self._look_at_slices(results)
        return Verdict(value, better, self._count_rising(results), self._enough())

    def _value(self, results: Mapping[str, float]) -> float:
        if self.metric not in results:
            raise ConfigError(
                f"contract.metric = {self.metric!r} is none that the evaluation gives; there are {', '.join(results)}",
                fix=nearest(self.metric, list(results)),
            )
        return results[self.metric]

    def _is_better(self, value: float, best: float | None) -> bool:
        if not math.isfinite(value):
            return False
        if best is None or not math.isfinite(best):
            return True
        return value > best if self.higher_is_better else value < best

    def _look_at_slices(self, results: Mapping[str, float]) -> None:
        base = self.metric.partition(SLICE)[0]
        for name in self._slices:
            value = results.get(f"{base}{SLICE}{name}")
            if value is None:
                continue
            known = self.slices.get(name, {}).get("best")
            best = value if self._is_better(value, known) or known is None else known
            self.slices[name] = {"value": value, "best": best}

    def _count_rising(self, results: Mapping[str, float]) -> int:
        """How often in a row, when that is a multiple of the limit."""
        loss = results.get(LOSS, math.nan)
        self._rising = self._rising + 1 if not loss <= self._last_loss else 0  # nan rises
        self._last_loss = loss if math.isfinite(loss) else self._last_loss
        worth = self.rising_limit > 0 and self._rising > 0 and self._rising % self.rising_limit == 0
        return self._rising if worth else 0

    def _enough(self) -> str:
        if not self._patience or self._waited < self._patience:
            return ""
        best = "no number yet" if self.best is None else f"{self.best:.6g} at step {self.best_step}"
        return (
            f"early stop: {self.metric} has not been better for {self._waited} evaluations (evaluation.patience = "
            f"{self._patience}); the best is {best}"
        )

    def lose_best(self, left: Mapping[int, float]) -> None:
        """Its checkpoint is gone: the best of those that are ``left``, by their steps, counts from now on."""
        sign = -1.0 if self.higher_is_better else 1.0
        self.best_step = min(left, key=lambda step: (sign * left[step], -step), default=None)
        self.best = None if self.best_step is None else left[self.best_step]

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "best": self.best,
            "best_step": self.best_step,
            "slices": self.slices,
            "waited": self._waited,
            "rising": self._rising,
            "last_loss": None if math.isinf(self._last_loss) else self._last_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was best by another metric says nothing of this one."""
        if state["metric"] == self.metric:
            self.best, self.best_step, self._waited = state["best"], state["best_step"], int(state["waited"])
            self.slices = {name: dict(values) for name, values in state["slices"].items() if name in self._slices}
        self._rising = int(state["rising"])
        self._last_loss = math.inf if state["last_loss"] is None else float(state["last_loss"])

"""Evaluations on the way: when they are due, which of them were made, and what follows from what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clustertrain.errors import UsageError
from clustertrain.train.evaluation.best_metric import EarlyStopping, EvalOutcome

Results = dict[str, float]


class EvaluationSchedule:
    """Hand it to ``session.steps(evaluations=...)``, which asks it after each step and keeps its state in the
    checkpoint.

    One is due every ``every`` steps and at the end. One that a stop has cut short is made up when the run goes on, with
    the model as it was then: nothing has been trained in between.
    """

    def __init__(
        self,
        evaluate: Callable[[], Results],
        *,
        every: int,
        early_stopping: EarlyStopping,
        on_value: Callable[[float], None] | None = None,
    ) -> None:
        """``evaluate`` returns nothing when the ranks have agreed to stop; ``on_value`` is told each deciding value, as
        ``LearningRate.observe`` wants it."""
        if every < 1:
            raise UsageError(f"evaluations: every = {every}: must be 1 or more steps")
        self._evaluate = evaluate
        self._every = every
        self._on_value = on_value
        self.early_stopping = early_stopping
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self._last_eval_step = 0  # step of the newest one
        self.stop_reason = ""  # why the run is to end early
        self.last_outcome: EvalOutcome | None = None  # of this step, if there was one
        self.early_stopping.init_fresh_state()

    def is_due(self, step: int, total: int) -> bool:
        """``step``: how many are done. Due until it was made."""
        return step > self._last_eval_step and (step % self._every == 0 or step == total)

    def run(self, step: int) -> Results:
        """Empty where a stop came in between: it stays due."""
        self.last_outcome = None
        results = self._evaluate()
        if results:
            self.last_outcome = self.early_stopping.observe(step, results)
            self._last_eval_step = step
            self.stop_reason = self.last_outcome.stop_reason
            if self._on_value is not None:
                self._on_value(self.last_outcome.value)
        return results

    def is_best(self, step: int) -> bool:
        """Whether the model as it is after ``step`` steps is the best so far."""
        return step == self._last_eval_step == self.early_stopping.best_step

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._last_eval_step, "over": self.stop_reason, "judge": self.early_stopping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_eval_step, self.stop_reason = int(state["made"]), str(state["over"])
        self.early_stopping.load_state_dict(state["judge"])

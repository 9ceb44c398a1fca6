"""Evaluations during training: when they are due, and what follows from their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clustertrain.errors import UsageError
from clustertrain.train.evaluation.best_metric import EarlyStopping, EvalOutcome

Results = dict[str, float]


class EvaluationSchedule:
    """Schedule of a run's evaluations, for ``session.steps(evaluations=...)``, which runs them and saves their state in
    checkpoints.

    An evaluation is due every ``every`` steps and at the end. If a stop interrupts it, it is repeated after the resume
    with the same model, since nothing was trained in between.
    """

    def __init__(
        self,
        evaluate: Callable[[], Results],
        *,
        every: int,
        early_stopping: EarlyStopping,
        on_value: Callable[[float], None] | None = None,
    ) -> None:
        """Create the schedule.

        Args:
            evaluate: returns the results; empty if the ranks agreed to stop.
            on_value: receives each value of the deciding metric, as ``LearningRate.observe`` does.
        """
        if every < 1:
            raise UsageError(f"evaluations: every = {every}: must be 1 or more steps")
        self._evaluate = evaluate
        self._every = every
        self._on_value = on_value
        self.early_stopping = early_stopping
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self._last_eval_step = 0
        self.stop_reason = ""
        """Why the run should end early; empty if it should not."""
        self.last_outcome: EvalOutcome | None = None
        """Outcome of the evaluation at this step, if there was one."""
        self.early_stopping.init_fresh_state()

    def is_due(self, step: int, total: int) -> bool:
        """Return whether an evaluation is due after ``step`` steps and has not run yet."""
        return step > self._last_eval_step and (step % self._every == 0 or step == total)

    def run(self, step: int) -> Results:
        """Evaluate and return the results; empty if a stop interrupted it, in which case it stays due."""
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
        """Return whether the model after ``step`` steps is the best so far."""
        return step == self._last_eval_step == self.early_stopping.best_step

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._last_eval_step, "over": self.stop_reason, "judge": self.early_stopping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_eval_step, self.stop_reason = int(state["made"]), str(state["over"])
        self.early_stopping.load_state_dict(state["judge"])

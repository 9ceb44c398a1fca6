"""Evaluations on the way: when they are due, which of them were made, and what follows from what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clustertrain.errors import UsageError
from clustertrain.train.evaluation.best_metric import Judge, Verdict

Results = dict[str, float]


class Evaluations:
    """Hand it to ``session.steps(evaluations=...)``, which asks it after each step and keeps its state in the
    checkpoint.

    One is due every ``every`` steps and at the end. One that a stop has cut short is made up when the run goes on, with
    the model as it was then: nothing has been trained in between.
    """

    def __init__(
        self, measure: Callable[[], Results], *, every: int, judge: Judge, then: Callable[[float], None] | None = None
    ) -> None:
        """``measure`` returns nothing when the ranks have agreed to stop; ``then`` is told each deciding value, as
        ``LearningRate.observe`` wants it."""
        if every < 1:
            raise UsageError(f"evaluations: every = {every}: must be 1 or more steps")
        self._measure = measure
        self._every = every
        self._then = then
        self.judge = judge
        self.begin_anew()

    def begin_anew(self) -> None:
        self._made = 0  # step of the newest one
        self.over = ""  # why the run is to end early
        self.newest: Verdict | None = None  # of this step, if there was one
        self.judge.begin_anew()

    def is_due(self, step: int, total: int) -> bool:
        """``step``: how many are done. Due until it was made."""
        return step > self._made and (step % self._every == 0 or step == total)

    def make(self, step: int) -> Results:
        """Empty where a stop came in between: it stays due."""
        self.newest = None
        results = self._measure()
        if results:
            self.newest = self.judge.observe(step, results)
            self._made = step
            self.over = self.newest.enough
            if self._then is not None:
                self._then(self.newest.value)
        return results

    def is_best(self, step: int) -> bool:
        """Whether the model as it is after ``step`` steps is the best so far."""
        return step == self._made == self.judge.best_step

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._made, "over": self.over, "judge": self.judge.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made, self.over = int(state["made"]), str(state["over"])
        self.judge.load_state_dict(state["judge"])

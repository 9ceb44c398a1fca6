"""What the host makes of the steps: how many were skipped, and when the run must stop or go back.

All ranks come to the same conclusion at the same step without telling each other: the figures have the same bits on all
of them, and each looks at a step a fixed number of steps later, not when its figures happen to be there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertrain.config.stability import StabilitySpec
from clustertrain.errors import Diverged
from clustertrain.train.core.async_copy import AsyncCopy
from clustertrain.train.core.step_types import StepResult

CHECK_LAG_STEPS = 2  # steps: the host runs ahead of a GPU, and so far may it do so


@dataclass(frozen=True)
class Rollback:
    """Go back: leave out the data of the steps ``first_step`` to ``last_step``, numbered from 1, as in the rows."""

    first_step: int
    last_step: int
    reason: str


class DivergencePolicy:
    """``skipped`` counts the steps of this run that were skipped because they were bad: not finite, or a spike where
    the recipe skips them. Those that fp16's loss scale takes care of are ``overflows``."""

    def __init__(self, spec: StabilitySpec, lag: int) -> None:
        """``lag``: how many steps after a step it is looked at; 0 where the host need not wait for its figures."""
        self._spec = spec
        self._lag = lag
        self._pending: deque[tuple[int, AsyncCopy]] = deque()
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self._consecutive_skips = 0
        self._first_skipped = 0  # of them; steps that fp16's scale took care of may lie between
        self.skipped = 0
        self.overflows = 0

    def enqueue(self, step: int, result: StepResult) -> None:
        """``step``: the number of the step that was done, from 1."""
        names = ("loss", "grad_norm", "skipped", "finite", "spike")
        values = AsyncCopy(names, [result.loss, result.grad_norm, result.skipped, result.finite, result.spike])
        if result.overflow:
            self.overflows += 1
        else:
            self._pending.append((step, values))

    def check(self, step: int, *, check_all: bool = False) -> Rollback | None:
        """What follows from the steps whose turn it is after step number ``step``, or from all: before a checkpoint
        there must be no step in it of which nothing is known. What was not looked at is dropped when the run goes back.

        Raises:
            Diverged: the run must not go on, on all ranks.
        """
        while self._pending and (check_all or self._pending[0][0] <= step - self._lag):
            checked_step, values = self._pending.popleft()
            rollback = self._check_step(checked_step, values.to_dict())
            if rollback is not None:
                self._pending.clear()
                self._consecutive_skips = 0
                return rollback
        return None

    def _check_step(self, step: int, values: Mapping[str, Any]) -> Rollback | None:
        spec = self._spec
        if values["spike"] and spec.spike == "roll-back":
            return Rollback(step, step, f"a loss spike: {values['loss']:.6g} at step {step}")
        if not values["skipped"]:
            self._consecutive_skips = 0
            return None
        self.skipped += 1
        self._consecutive_skips += 1
        self._first_skipped = step if self._consecutive_skips == 1 else self._first_skipped
        if self._consecutive_skips < spec.max_skipped:
            return None
        first = self._first_skipped
        reason = f"{self._consecutive_skips} steps in a row skipped, {first} to {step}: {describe_problem(values)}"
        if spec.then == "roll-back":
            return Rollback(first, step, reason)
        raise Diverged(
            f"{reason}; a requeue would meet the same",
            fix='see "Stability" of the docs: a lower learning rate or longer warmup, stability.then = "roll-back", or '
            "look at the data of these steps, which their rows name (bad_samples)",
        )

    def state_dict(self) -> dict[str, int]:
        return {
            "in_a_row": self._consecutive_skips,
            "first": self._first_skipped,
            "skipped": self.skipped,
            "overflows": self.overflows,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._consecutive_skips, self._first_skipped = int(state["in_a_row"]), int(state["first"])
        self.skipped, self.overflows = int(state["skipped"]), int(state["overflows"])


def describe_problem(values: Mapping[str, Any]) -> str:
    if values["finite"]:
        return f"the loss is {values['loss']:.6g}, far above the last ones"
    return f"the loss is {values['loss']:.6g} and the gradient norm {values['grad_norm']:.6g}"


class PositionHistory:
    """How far each loader had come by the last steps, so that their samples can be named afterwards."""

    def __init__(self, steps: int) -> None:
        """``steps``: how many to remember."""
        self._steps = steps
        self._entries: deque[tuple[int, dict[str, tuple[int, int]]]] = deque(maxlen=steps)

    def record(self, step: int, positions: Mapping[str, tuple[int, int]]) -> None:
        """``positions``: of each loader before and after step number ``step``."""
        self._entries.append((step, dict(positions)))

    def ranges_between(self, first: int, last: int) -> dict[str, list[list[int]]]:
        """By loader the (first, end) ranges of positions that the steps ``first_step`` to ``last_step`` took."""
        ranges: dict[str, list[list[int]]] = {}
        for step, positions in self._entries:
            if first <= step <= last:
                for name, (begin, end) in positions.items():
                    if end > begin:
                        ranges.setdefault(name, []).append([begin, end])
        return ranges

    def init_fresh_state(self) -> None:
        self._entries.clear()

    def state_dict(self) -> list[Any]:
        return [[step, {name: list(p) for name, p in positions.items()}] for step, positions in self._entries]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        entries = [
            (int(step), {name: (int(p[0]), int(p[1])) for name, p in positions.items()}) for step, positions in state
        ]
        self._entries = deque(entries, maxlen=self._steps)

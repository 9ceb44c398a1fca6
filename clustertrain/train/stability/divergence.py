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
from clustertrain.train.core.async_copy import Arriving
from clustertrain.train.core.step_types import StepResult

LAG = 2  # steps: the host runs ahead of a GPU, and so far may it do so


@dataclass(frozen=True)
class Back:
    """Go back: leave out the data of the steps ``first`` to ``last``, numbered from 1, as in the rows."""

    first: int
    last: int
    why: str


class Supervisor:
    """``skipped`` counts the steps of this run that were skipped because they were bad: not finite, or a spike where
    the recipe skips them. Those that fp16's loss scale takes care of are ``overflows``."""

    def __init__(self, spec: StabilitySpec, lag: int) -> None:
        """``lag``: how many steps after a step it is looked at; 0 where the host need not wait for its figures."""
        self._spec = spec
        self._lag = lag
        self._waiting: deque[tuple[int, Arriving]] = deque()
        self.begin_anew()

    def begin_anew(self) -> None:
        self._in_a_row = 0
        self._first = 0  # of them; steps that fp16's scale took care of may lie between
        self.skipped = 0
        self.overflows = 0

    def put(self, step: int, done: StepResult) -> None:
        """``step``: the number of the step that was done, from 1."""
        names = ("loss", "grad_norm", "skipped", "finite", "spike")
        figures = Arriving(names, [done.loss, done.grad_norm, done.skipped, done.finite, done.spike])
        if done.overflow:
            self.overflows += 1
        else:
            self._waiting.append((step, figures))

    def look(self, step: int, *, everything: bool = False) -> Back | None:
        """What follows from the steps whose turn it is after step number ``step``, or from all: before a checkpoint
        there must be no step in it of which nothing is known. What was not looked at is dropped when the run goes back.

        Raises:
            Diverged: the run must not go on, on all ranks.
        """
        while self._waiting and (everything or self._waiting[0][0] <= step - self._lag):
            number, figures = self._waiting.popleft()
            back = self._judge(number, figures.plain())
            if back is not None:
                self._waiting.clear()
                self._in_a_row = 0
                return back
        return None

    def _judge(self, step: int, figures: Mapping[str, Any]) -> Back | None:
        spec = self._spec
        if figures["spike"] and spec.spike == "roll-back":
            return Back(step, step, f"a loss spike: {figures['loss']:.6g} at step {step}")
        if not figures["skipped"]:
            self._in_a_row = 0
            return None
        self.skipped += 1
        self._in_a_row += 1
        self._first = step if self._in_a_row == 1 else self._first
        if self._in_a_row < spec.max_skipped:
            return None
        first = self._first
        why = f"{self._in_a_row} steps in a row skipped, {first} to {step}: {what_is_wrong(figures)}"
        if spec.then == "roll-back":
            return Back(first, step, why)
        raise Diverged(
            f"{why}; a requeue would meet the same",
            fix='see "Stability" of the docs: a lower learning rate or longer warmup, stability.then = "roll-back", or '
            "look at the data of these steps, which their rows name (bad_samples)",
        )

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self._in_a_row, "first": self._first, "skipped": self.skipped, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._in_a_row, self._first = int(state["in_a_row"]), int(state["first"])
        self.skipped, self.overflows = int(state["skipped"]), int(state["overflows"])


def what_is_wrong(figures: Mapping[str, Any]) -> str:
    if figures["finite"]:
        return f"the loss is {figures['loss']:.6g}, far above the last ones"
    return f"the loss is {figures['loss']:.6g} and the gradient norm {figures['grad_norm']:.6g}"


class Trail:
    """How far each loader had come by the last steps, so that their samples can be named afterwards."""

    def __init__(self, steps: int) -> None:
        """``steps``: how many to remember."""
        self._steps = steps
        self._known: deque[tuple[int, dict[str, tuple[int, int]]]] = deque(maxlen=steps)

    def note(self, step: int, positions: Mapping[str, tuple[int, int]]) -> None:
        """``positions``: of each loader before and after step number ``step``."""
        self._known.append((step, dict(positions)))

    def samples_of(self, first: int, last: int) -> dict[str, list[list[int]]]:
        """By loader the (first, end) ranges of positions that the steps ``first`` to ``last`` took."""
        found: dict[str, list[list[int]]] = {}
        for step, positions in self._known:
            if first <= step <= last:
                for name, (begin, end) in positions.items():
                    if end > begin:
                        found.setdefault(name, []).append([begin, end])
        return found

    def begin_anew(self) -> None:
        self._known.clear()

    def state_dict(self) -> list[Any]:
        return [[step, {name: list(p) for name, p in positions.items()}] for step, positions in self._known]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        known = [(int(step), {name: (int(p[0]), int(p[1])) for name, p in at.items()}) for step, at in state]
        self._known = deque(known, maxlen=self._steps)

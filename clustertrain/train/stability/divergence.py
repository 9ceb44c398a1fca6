"""Host-side policy that counts skipped steps and decides when the run must stop or roll back.

All ranks reach the same decision at the same step without communication: values have the same bits on all ranks, and
each step is checked a fixed number of steps later rather than when its values arrive.
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

CHECK_LAG_STEPS = 2  # steps that the host may run ahead of a GPU


@dataclass(frozen=True)
class Rollback:
    """Request to roll back and exclude the data of a range of steps."""

    first_step: int
    """First step, numbered from 1 as in the metrics rows."""
    last_step: int
    reason: str


class DivergencePolicy:
    """Policy that stops or rolls back after bad steps: NaN or Inf, or a spike if the recipe skips spikes."""

    def __init__(self, spec: StabilitySpec, lag: int) -> None:
        """``lag``: number of steps between a step and its check; 0 if the host need not wait for its values."""
        self._spec = spec
        self._lag = lag
        self._pending: deque[tuple[int, AsyncCopy]] = deque()
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self._consecutive_skips = 0
        self._first_skipped = 0  # first of the consecutive skips; fp16 overflows may lie in between
        self.skipped = 0
        """Bad steps of this run that were skipped."""
        self.overflows = 0
        """Steps skipped because of the fp16 loss scale."""

    def enqueue(self, step: int, result: StepResult) -> None:
        """Queue the result of ``step``, numbered from 1, for a later check."""
        names = ("loss", "grad_norm", "skipped", "finite", "spike")
        values = AsyncCopy(names, [result.loss, result.grad_norm, result.skipped, result.finite, result.spike])
        if result.overflow:
            self.overflows += 1
        else:
            self._pending.append((step, values))

    def check(self, step: int, *, check_all: bool = False) -> Rollback | None:
        """Check the queued steps that are due after ``step``, and return a rollback if one is needed.

        ``check_all`` checks every queued step: a checkpoint must not contain an unchecked one. A rollback drops the
        rest of the queue.

        Raises:
            Diverged: the run must stop, on all ranks.
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
        reason = f"{self._consecutive_skips} steps in a row were skipped, {first} to {step}: {describe_problem(values)}"
        if spec.on_divergence == "roll-back":
            return Rollback(first, step, reason)
        raise Diverged(
            f"{reason}; a requeue would fail the same way",
            fix='see "Stability" in the docs: lower the learning rate, lengthen warmup, set stability.on_divergence = '
            '"roll-back", or inspect the data of these steps, listed in their rows (bad_samples)',
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
    """Return why a step was skipped."""
    if values["finite"]:
        return f"the loss is {values['loss']:.6g}, far above recent ones"
    return f"the loss is {values['loss']:.6g} and the gradient norm {values['grad_norm']:.6g}"


class PositionHistory:
    """Positions of each loader before and after recent steps, from which their samples can be named later."""

    def __init__(self, steps: int) -> None:
        """Keep the positions of the last ``steps`` steps."""
        self._steps = steps
        self._entries: deque[tuple[int, dict[str, tuple[int, int]]]] = deque(maxlen=steps)

    def record(self, step: int, positions: Mapping[str, tuple[int, int]]) -> None:
        """Record ``positions``, each loader's (before, after) ``step``."""
        self._entries.append((step, dict(positions)))

    def ranges_between(self, first: int, last: int) -> dict[str, list[list[int]]]:
        """Return the (first, end) ranges of positions that steps ``first`` to ``last`` consumed, by loader."""
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

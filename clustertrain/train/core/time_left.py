"""How long this process has before it must end, and whether a save fits into that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from clustertrain import clock
from clustertrain.train.core.stop import StopAgreement

REMEMBERED = 5  # saves: one that a busy hour made slow must not forbid all later ones
SAVE_MARGIN = 1.5  # a save beside dying neighbours takes longer than one in peace
ORDERLY_END_S = 2.0  # at the deadline, for what follows the last save
LEAST_S = 2.0  # that a save under way is waited for, whatever the deadline


class TimeLeft:
    def __init__(self, deadline: Callable[[], float | None]) -> None:
        """``deadline`` says by when the process must have ended (UTC epoch s), once somebody has said so."""
        self._deadline = deadline
        self._ends: float | None = None  # by the monotonic clock
        self.saves_s: deque[float] = deque(maxlen=REMEMBERED)

    def left_s(self) -> float:
        """As far as this rank was told; inf: nobody has said so."""
        deadline = self._deadline()
        return math.inf if deadline is None else deadline - clock.now()

    def must_end_in(self, left_s: float) -> None:
        """What all ranks go by from now on: they give up together, or one would wait for another one's word. It does
        not depend on the wall clock any more."""
        if math.isfinite(left_s):
            # A deadline that is past is a late word or a clock that jumped: the kill may still be some way off.
            until = clock.monotonic() + max(LEAST_S, left_s - ORDERLY_END_S)
            self._ends = until if self._ends is None else min(self._ends, until)

    def until(self) -> float | None:
        """When waiting for a save must end, so that there is time for an orderly end."""
        if self._ends is None:
            self.must_end_in(self.left_s())
        return self._ends

    def is_late(self, agreement: StopAgreement, saves: int) -> bool:
        """Whether it is too late for so many saves, on all ranks alike; they go by the earliest deadline from now on.
        Collective.

        By the slowest of the last ones. The newest committed checkpoint then stands; a save that is killed half way
        would not change that, only cost the orderly end."""
        left_s = agreement.least(self.left_s())
        self.must_end_in(left_s)
        return agreement.any(SAVE_MARGIN * saves * self.slow_s > left_s)

    @property
    def slow_s(self) -> float:
        return max(self.saves_s, default=0.0)

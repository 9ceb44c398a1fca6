"""How long this process has before it must end, and whether a save fits into that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from clustertrain import clock
from clustertrain.train.core.stop import StopAgreement

SAVE_WINDOW = 5  # saves: one that a busy hour made slow must not forbid all later ones
SAVE_MARGIN = 1.5  # a save beside dying neighbours takes longer than one in peace
SHUTDOWN_MARGIN_S = 2.0  # at the deadline, for what follows the last save
MIN_SAVE_WAIT_S = 2.0  # that a save under way is waited for, whatever the deadline


class DeadlineTracker:
    def __init__(self, get_deadline: Callable[[], float | None]) -> None:
        """``get_deadline`` says by when the process must have ended (UTC epoch s), once somebody has said so."""
        self._get_deadline = get_deadline
        self._save_deadline: float | None = None  # by the monotonic clock
        self.save_durations_s: deque[float] = deque(maxlen=SAVE_WINDOW)

    def remaining_s(self) -> float:
        """As far as this rank was told; inf: nobody has said so."""
        deadline = self._get_deadline()
        return math.inf if deadline is None else deadline - clock.now()

    def set_remaining(self, remaining_s: float) -> None:
        """What all ranks go by from now on: they give up together, or one would wait for another one's word. It does
        not depend on the wall clock any more."""
        if math.isfinite(remaining_s):
            # A deadline that is past is a late word or a clock that jumped: the kill may still be some way off.
            deadline = clock.monotonic() + max(MIN_SAVE_WAIT_S, remaining_s - SHUTDOWN_MARGIN_S)
            self._save_deadline = deadline if self._save_deadline is None else min(self._save_deadline, deadline)

    def save_deadline(self) -> float | None:
        """When waiting for a save must end, so that there is time for an orderly end."""
        if self._save_deadline is None:
            self.set_remaining(self.remaining_s())
        return self._save_deadline

    def is_too_late_to_save(self, agreement: StopAgreement, num_saves: int) -> bool:
        """Whether it is too late for so many saves, on all ranks alike; they go by the earliest deadline from now on.
        Collective.

        By the slowest of the last ones. The newest committed checkpoint then stands; a save that is killed half way
        would not change that, only cost the orderly end."""
        remaining_s = agreement.min_over_ranks(self.remaining_s())
        self.set_remaining(remaining_s)
        return agreement.any_rank(SAVE_MARGIN * num_saves * self.slowest_save_s > remaining_s)

    @property
    def slowest_save_s(self) -> float:
        return max(self.save_durations_s, default=0.0)

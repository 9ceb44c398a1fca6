"""Time until this process must end, and whether a save fits into it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from clustertrain import clock
from clustertrain.train.core.stop import StopAgreement

SAVE_WINDOW = 5  # number of recent saves considered: one slow save must not rule out all later ones
SAVE_MARGIN = 1.5  # a save takes longer while other processes of the job are shutting down
SHUTDOWN_MARGIN_S = 2.0  # before the deadline, for the shutdown after the last save
MIN_SAVE_WAIT_S = 2.0  # minimum wait for a pending save, whatever the deadline


class DeadlineTracker:
    """Tracker of the time until the deadline and of the duration of recent saves."""

    def __init__(self, get_deadline: Callable[[], float | None]) -> None:
        """``get_deadline`` returns when the process must have ended (UTC epoch s), or None without a deadline."""
        self._get_deadline = get_deadline
        self._save_deadline: float | None = None  # monotonic clock
        self.save_durations_s: deque[float] = deque(maxlen=SAVE_WINDOW)

    def remaining_s(self) -> float:
        """Return the seconds until the deadline that this rank knows of; inf without one."""
        deadline = self._get_deadline()
        return math.inf if deadline is None else deadline - clock.now()

    def set_remaining(self, remaining_s: float) -> None:
        """Set the common deadline for saves: all ranks must give up together, or some would wait for others.

        From then on, the deadline does not depend on the wall clock.
        """
        if math.isfinite(remaining_s):
            # A deadline in the past means a late message or a clock that jumped; the kill may still be some time away.
            deadline = clock.monotonic() + max(MIN_SAVE_WAIT_S, remaining_s - SHUTDOWN_MARGIN_S)
            self._save_deadline = deadline if self._save_deadline is None else min(self._save_deadline, deadline)

    def save_deadline(self) -> float | None:
        """Return when a wait for a save must end (monotonic clock) to leave time for shutdown; None if never."""
        if self._save_deadline is None:
            self.set_remaining(self.remaining_s())
        return self._save_deadline

    def is_too_late_to_save(self, agreement: StopAgreement, num_saves: int) -> bool:
        """Return whether ``num_saves`` saves no longer fit; the same on all ranks. Collective.

        The estimate uses the slowest recent save and the earliest deadline of all ranks, which all of them adopt. A
        save that is killed halfway would gain nothing and prevent an orderly shutdown.
        """
        remaining_s = agreement.min_over_ranks(self.remaining_s())
        self.set_remaining(remaining_s)
        return agreement.any_rank(SAVE_MARGIN * num_saves * self.slowest_save_s > remaining_s)

    @property
    def slowest_save_s(self) -> float:
        return max(self.save_durations_s, default=0.0)

"""When the next checkpoint is due: after a number of steps, after a time, or at the optimum interval ("auto").

``auto`` is the first-order optimum of J. W. Young, A first order approximation to the optimum checkpoint interval, CACM
17(9), 1974, and J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3),
2006: the time from one save to the next is

    T = sqrt(2 C M)

where C is the cost of a save in seconds of training, and M the mean time between failures. Daly's higher-order terms
matter only if C is not small compared with M, and then a run hardly makes progress anyway. The loss is flat near the
optimum: if C or M is wrong by a factor of 4, it is a quarter larger than necessary.

C is the stall plus the training time lost to slower steps while the save is written. Medians of the last saves are
used, because the first save allocates buffers and a file system may be busy at times. Before the first save, C is
``ASSUMED_STALL_S``, a typical cost of a background save. It errs on the short side, because the first save measures C.

M is (prior + time trained) / (1 + failures): see :class:`FailureHistory`.

Bounds; later ones override earlier ones:

* at most ``MAX_INTERVAL_S``: M is estimated from few failures, and no failure should cost more than an hour;
* at least ``MIN_INTERVAL_S``: each save creates files, and deletes old ones, on the metadata servers;
* at least ``MIN_INTERVAL_SAVES`` times the time from the start of a save to its commit: writing then takes at most a
  tenth of the time, and a failure rarely hits a pending save.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from clustertrain import clock
from clustertrain.config.checkpoint import AUTO, check_interval, parse_interval_s
from clustertrain.errors import ConfigError
from clustertrain.run import endings
from clustertrain.run.attempts import Attempt

ASSUMED_STALL_S = 1.0
MAX_INTERVAL_S = 3600.0
MIN_INTERVAL_S = 30.0
MIN_INTERVAL_SAVES = 10
COST_WINDOW = 5

RUN_PRIOR_MTBF_S = 24 * 3600.0  # failures that do not depend on the number of nodes: code, file system, maintenance
# 1.8 h for 16,384 GPUs, 8 a node, as projected by Kokolis et al., Revisiting reliability in large-scale machine
# learning research clusters, HPCA 2025 (arXiv 2410.21680).
NODE_PRIOR_MTBF_S = 1.8 * 3600.0 * 16_384 / 8

# Usually preceded by a warning; the steps lost show whether there was time to save.
_WARNED_ENDINGS = frozenset({endings.PREEMPTED, endings.TIME_LIMIT, endings.SIGNAL, endings.UNKNOWN})
_NON_FAILURE_ENDINGS = frozenset({endings.COMPLETED, endings.CANCELLED})


@dataclass(frozen=True)
class FailureHistory:
    """The failures of earlier attempts."""

    count: int = 0
    """Number of failures."""
    trained_s: float = 0.0
    """Seconds of training in which they occurred."""
    prior_mtbf_s: float = RUN_PRIOR_MTBF_S
    """The prior: one assumed failure in so many seconds. It gives a mean before the first failure, and has little
    weight after a few failures."""

    def mtbf_s(self, extra_trained_s: float = 0.0) -> float:
        """Return the mean seconds between failures, after another ``extra_trained_s`` without one."""
        return (self.prior_mtbf_s + self.trained_s + extra_trained_s) / (1 + self.count)


def count_failures(attempts: Iterable[Attempt], nodes: int) -> FailureHistory:
    """Count the failures in the attempts of a run that have ended. It uses ``nodes`` nodes now.

    A failure is an ending that loses steps:

    * node_failure, out_of_memory, hang, communication and failed, which come without a warning, always count;
    * preempted, time_limit, signal and unknown count if steps were lost. After a warning with time for a save nothing
      is lost, so more frequent saves would gain nothing;
    * completed and cancelled do not count;
    * an attempt that ended before its first step counts neither as a failure nor as time.

    The time is that of whole attempts, including startup. The prior adds two rates: ``RUN_PRIOR_MTBF_S`` for any
    run, and ``NODE_PRIOR_MTBF_S`` for each node.
    """
    count, trained_s = 0, 0.0
    for attempt in attempts:
        if attempt.ending is None or attempt.first_step is None:
            continue
        if attempt.start is not None and attempt.end is not None:
            trained_s += max(0.0, attempt.end - attempt.start)  # negative if the clocks of two hosts differ
        count += _is_failure(attempt)
    return FailureHistory(count, trained_s, 1 / (1 / RUN_PRIOR_MTBF_S + nodes / NODE_PRIOR_MTBF_S))


def _is_failure(attempt: Attempt) -> bool:
    if attempt.ending in _NON_FAILURE_ENDINGS:
        return False
    saved_step = max(attempt.committed_step or 0, attempt.restored_step or 0)
    return attempt.ending not in _WARNED_ENDINGS or (attempt.last_step or 0) > saved_step


def young_daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the optimum seconds between saves, without bounds."""
    return math.sqrt(2 * cost_s * mtbf_s)


@dataclass(frozen=True)
class _IntervalEstimate:
    seconds: float
    bound_text: str = ""  # the bound that applied, empty if none
    stall_s: float = 0.0
    slowdown_s: float = 0.0
    mtbf_s: float = 0.0


class CheckpointInterval:
    """Decides between steps whether a save is due. Its timer starts when it is created.

    :meth:`is_due_at` is the same on all ranks. :meth:`is_overdue` uses a clock, so one rank must decide for all; it
    stays true until :meth:`restart_timer`, so the others may learn of it at a later step. It is needed only if
    ``is_timed``, and only the deciding rank has to call :meth:`record_save`.
    """

    def __init__(
        self,
        every: int | str,
        *,
        milestone: int = 0,
        history: FailureHistory = FailureHistory(),
        monotonic: Callable[[], float] = clock.monotonic,
    ) -> None:
        """
        Args:
            every: steps, a time ("10min") or "auto", like ``every`` in the ``[checkpoint]`` table.
            milestone: a save is also due at each multiple of this step, like ``keep_every``; 0: none.
            history: from :func:`count_failures`; only "auto" uses it.
            monotonic: a monotonic clock, in seconds.

        Raises:
            ConfigError: ``every`` is invalid.
        """
        try:
            check_interval("checkpoint_every", every)
        except ValueError as e:
            raise ConfigError(str(e)) from e
        self._every_steps = every if isinstance(every, int) else 0
        self._auto = every == AUTO
        self._milestone = milestone
        self._history = history
        self._monotonic = monotonic
        self._created_at = self._timer_start = monotonic()
        self._save_costs: deque[tuple[float, float, float]] = deque(maxlen=COST_WINDOW)  # stall, slow-down, whole save
        self._fixed_interval_s = (
            parse_interval_s("checkpoint_every", every) if isinstance(every, str) and not self._auto else math.inf
        )
        self._estimate = self._estimate_interval()

    @property
    def is_timed(self) -> bool:
        """Whether a clock decides; otherwise :meth:`is_overdue` is never true."""
        return not self._every_steps

    @property
    def seconds(self) -> float | None:
        """The time between saves; None if steps are counted."""
        return self._estimate.seconds if self.is_timed else None

    def is_due_at(self, step: int) -> bool:
        """Return whether a save is due after step ``step``, by counting steps."""
        return any(n > 0 and step % n == 0 for n in (self._every_steps, self._milestone))

    def is_overdue(self) -> bool:
        """Return whether the interval since the last save has passed."""
        return self._monotonic() - self._timer_start >= self._estimate.seconds

    def restart_timer(self) -> None:
        """Start the interval again, when training continues after a save that may still be pending."""
        self._timer_start = self._monotonic()

    def record_save(self, stall_s: float, save_s: float, slowdown_fraction: float = 0.0) -> None:
        """Record the cost of a committed save, and update the interval of ``auto``.

        Args:
            stall_s: seconds for which training waited.
            save_s: seconds from the start to the commit, including the stall.
            slowdown_fraction: loss of training speed during the rest of ``save_s``, 0 to 1.
        """
        self._save_costs.append((stall_s, slowdown_fraction * max(0.0, save_s - stall_s), save_s))
        self._estimate = self._estimate_interval()

    def format_explanation(self) -> str:
        """Return a line for the event log: ``every 213 s: stall 0.8 s, 7.9 h between failures``."""
        if self._every_steps:
            return f"every {self._every_steps} steps"
        estimate = self._estimate
        if not self._auto:
            return f"every {_format_number(estimate.seconds)} s"
        cost = f"stall {_format_number(estimate.stall_s)} s"
        if estimate.slowdown_s:
            cost += f" and {_format_number(estimate.slowdown_s)} s by slower steps"
        if not self._save_costs:
            cost += " (assumed)"
        mtbf_text = f"{_format_number(estimate.mtbf_s / 3600)} h between failures"
        if not self._history.count:
            mtbf_text += " (none seen)"
        return f"every {_format_number(estimate.seconds)} s{estimate.bound_text}: {cost}, {mtbf_text}"

    def _estimate_interval(self) -> _IntervalEstimate:
        if not self._auto:
            return _IntervalEstimate(self._fixed_interval_s)
        stall_s, slowdown_s, save_s = ASSUMED_STALL_S, 0.0, 0.0
        if self._save_costs:
            stall_s, slowdown_s, save_s = (statistics.median(column) for column in zip(*self._save_costs, strict=True))
        mtbf_s = self._history.mtbf_s(self._monotonic() - self._created_at)
        capped = min((young_daly_interval_s(stall_s + slowdown_s, mtbf_s), ""), (MAX_INTERVAL_S, ", the longest"))
        seconds, bound_text = max(
            capped, (MIN_INTERVAL_S, ", the shortest"), (MIN_INTERVAL_SAVES * save_s, ", ten times a save")
        )
        return _IntervalEstimate(seconds, bound_text, stall_s, slowdown_s, mtbf_s)


def _format_number(value: float) -> str:
    return f"{value:.3g}" if value < 999 else f"{value:.0f}"

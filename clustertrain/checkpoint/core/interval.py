"""When the next checkpoint is due: after so many steps, after so long, or as often as it pays.

``auto`` is the first-order optimum of J. W. Young, A first order approximation to the optimum checkpoint interval, CACM
17(9), 1974, and J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3),
2006: the time from one save to the next is

    T = sqrt(2 C M)

where C is what a save costs the training in seconds, and M the mean time between failures. Daly's further terms matter
where C is not small against M, and there a run hardly gets on anyway. Near the optimum the loss is flat: with a C or M
that is wrong by a factor of 4 it is a quarter larger than it had to be.

C is the stall, and of what is written while the training goes on the part of that time by which it is slowed down. The
medians of the last saves count, since the first has buffers to allocate and a busy file system has its moments.
Before the first save C is ``ASSUMED_STALL_S``, of the order of what saves in the background cost; too short rather
than too long, because that save is what measures it.

M is (prior + time trained) / (1 + failures): see :class:`FailureHistory`.

Bounds, the stronger one last:

* not longer than ``MAX_INTERVAL_S``: M is a guess from few failures, and a failure shall never cost more than an hour
of the
  run, whatever was guessed;
* not shorter than ``MIN_INTERVAL_S``: each save makes files for the metadata servers, and old ones to delete;
* not shorter than ``MIN_INTERVAL_SAVES`` times what a save takes until it is committed: writing then has at most a
tenth of
  the time, and a failure seldom finds one under way.
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

RUN_PRIOR_MTBF_S = 24 * 3600.0  # what does not grow with the nodes: the code, the file system, maintenance
# 1.8 h for 16,384 GPUs, 8 a node, as projected by Kokolis et al., Revisiting reliability in large-scale machine
# learning research clusters, HPCA 2025 (arXiv 2410.21680).
NODE_PRIOR_MTBF_S = 1.8 * 3600.0 * 16_384 / 8

# The ranks were told, as a rule; whether there was time to save is seen from what they lost.
_WARNED_ENDINGS = frozenset({endings.PREEMPTED, endings.TIME_LIMIT, endings.SIGNAL, endings.UNKNOWN})
_NON_FAILURE_ENDINGS = frozenset({endings.COMPLETED, endings.CANCELLED})


@dataclass(frozen=True)
class FailureHistory:
    """What earlier attempts say about the time between failures: ``count`` of them in ``trained_s`` seconds.

    The prior stands for one failure in ``prior_mtbf_s`` seconds that nobody saw, so that the first day has a mean too.
    After a few failures it weighs little.
    """

    count: int = 0
    trained_s: float = 0.0
    prior_mtbf_s: float = RUN_PRIOR_MTBF_S

    def mtbf_s(self, extra_trained_s: float = 0.0) -> float:
        """Seconds between failures, where the run has trained for another ``extra_trained_s`` without one."""
        return (self.prior_mtbf_s + self.trained_s + extra_trained_s) / (1 + self.count)


def count_failures(attempts: Iterable[Attempt], nodes: int) -> FailureHistory:
    """Count the failures of a run, on ``nodes`` nodes now, from its attempts. Those without an ending are left out.

    A failure is an ending that takes steps away:

    * one without a warning (node_failure, out_of_memory, hang, communication, user_error) always is;
    * preempted, time_limit, signal and unknown are where steps were done that no checkpoint has. After a warning with
      time for a save nothing is lost, however often the run is preempted, and saving more often would gain nothing;
    * completed and cancelled are none;
    * before its first step an attempt has nothing to lose: it counts neither as a failure nor as time.

    The time is that of the whole attempt, its startup included. The prior adds two rates: ``RUN_PRIOR_MTBF_S`` for any
    run, and ``NODE_PRIOR_MTBF_S`` for each node.
    """
    count, trained_s = 0, 0.0
    for attempt in attempts:
        if attempt.ending is None or attempt.first_step is None:
            continue
        if attempt.start is not None and attempt.end is not None:
            trained_s += max(0.0, attempt.end - attempt.start)  # clocks of two hosts perhaps
        count += _is_failure(attempt)
    return FailureHistory(count, trained_s, 1 / (1 / RUN_PRIOR_MTBF_S + nodes / NODE_PRIOR_MTBF_S))


def _is_failure(attempt: Attempt) -> bool:
    if attempt.ending in _NON_FAILURE_ENDINGS:
        return False
    saved_step = max(attempt.committed_step or 0, attempt.restored_step or 0)
    return attempt.ending not in _WARNED_ENDINGS or (attempt.last_step or 0) > saved_step


def young_daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds from one save to the next, without bounds: the formula above."""
    return math.sqrt(2 * cost_s * mtbf_s)


@dataclass(frozen=True)
class _IntervalEstimate:
    seconds: float
    bound_text: str = ""  # in words, where one decided
    stall_s: float = 0.0
    slowdown_s: float = 0.0
    mtbf_s: float = 0.0


class CheckpointInterval:
    """Says at each step boundary whether a save is due. The time runs from when it is made, so make it after the
    restore and before the first step.

    :meth:`is_due_at` is the same on all ranks. :meth:`is_overdue` looks at a clock, so only one rank's answer may
    count, and the
    others must be told; it stays true until :meth:`restart_timer`, so that they may be told at a later boundary. Only
    where
    ``is_timed`` is true is there anything to tell, and only the rank that answers has to call :meth:`record_save`.
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
            every: steps, a time ("10min") or "auto", as ``every`` of the ``[checkpoint]`` table.
            milestone: ``keep_every``: a save is also due at each multiple of so many steps; 0: at none.
            failures: what is known from before, :func:`count_failures`; only "auto" looks at it.
            monotonic: seconds, of a clock that nobody sets.

        Raises:
            ConfigError: ``every`` is none of these.
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
        """Whether :meth:`is_overdue` can ever be true."""
        return not self._every_steps

    @property
    def seconds(self) -> float | None:
        """From one save to the next; None where steps are counted."""
        return self._estimate.seconds if self.is_timed else None

    def is_due_at(self, step: int) -> bool:
        """Whether a save is due after ``step`` steps because of that number alone."""
        return any(n > 0 and step % n == 0 for n in (self._every_steps, self._milestone))

    def is_overdue(self) -> bool:
        """Whether the time is up since the last save."""
        return self._monotonic() - self._timer_start >= self._estimate.seconds

    def restart_timer(self) -> None:
        """The training goes on after a save: the time starts again. Its bytes may still be on their way."""
        self._timer_start = self._monotonic()

    def record_save(self, stall_s: float, save_s: float, slowdown_fraction: float = 0.0) -> None:
        """A save is committed; ``auto`` is reckoned anew.

        Args:
            stall_s: for which the training stood still.
            save_s: from the beginning to the commit, the stall included.
            slowdown: the share of the training's speed that was missing for the rest of ``save_s``, 0 to 1.
        """
        self._save_costs.append((stall_s, slowdown_fraction * max(0.0, save_s - stall_s), save_s))
        self._estimate = self._estimate_interval()

    def format_explanation(self) -> str:
        """One line for the event log: ``every 213 s: stall 0.8 s, 7.9 h between failures``."""
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

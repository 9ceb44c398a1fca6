"""Goodput: where the time of a run went, over all attempts. The parts sum to the wall time.

The bounds are UTC times from the batch hosts and the submitting host; the parts between them were measured with rank
0's monotonic clock. An attempt ends no later than the next one starts. If a clock was set, so that the measured parts
exceed a span, they shrink in proportion.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from clustertrain.run import endings, event_types, events, metrics, metrics_file, state
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import is_script_run

TIME_CATEGORIES = (
    "queue_s",
    "startup_s",
    "restore_s",
    "productive_s",
    "repeated_s",
    "checkpoint_stall_s",
    "evaluation_s",
    "other_s",
    "shutdown_s",
    "lost_s",
)
# Minimum and maximum number of later steps from which the normal time of an attempt's first step is estimated.
BASELINE_STEPS = (3, 30)


class Goodput(msgspec.Struct, kw_only=True):
    """Time of a run by category, in seconds. The categories from ``queue_s`` to ``lost_s`` sum to ``wall_s``.

    The ratios are null for a script that reported no step: what it did is unknown, and its time is in ``other_s``.
    """

    wall_s: float = 0.0
    """From submission to now or to the end of the run, without the time between an end and a manual restart."""
    queue_s: float = 0.0
    """Waiting for a start."""
    startup_s: float = 0.0
    """Until the first step, without the restore, plus the warm-up in that step."""
    restore_s: float = 0.0
    """Loading of checkpoints."""
    productive_s: float = 0.0
    """Steps that count."""
    repeated_s: float = 0.0
    """Steps that an earlier attempt had done and lost."""
    checkpoint_stall_s: float = 0.0
    """Time for which the training waited for checkpoints."""
    evaluation_s: float = 0.0
    """Evaluations."""
    other_s: float = 0.0
    """Between two steps, in the current step, or in a script without session.steps."""
    shutdown_s: float = 0.0
    """From the last step to the end of an attempt that stopped by agreement or completed."""
    lost_s: float = 0.0
    """From the last step to the end of an attempt that was killed: part of a step, a hang, the wait for the node."""
    ratio: float | None = 0.0
    """Productive time over wall time, 0 to 1; null for a script that reported no step."""
    effective_ratio: float | None = 0.0
    """Effective training time ratio: productive time over the time with nodes (wall time without the queue), 0 to 1;
    null for a script that reported no step."""
    data_wait_s: float = 0.0
    """Rank 0's wait for its loaders, within productive and repeated steps."""


class TimeRange(NamedTuple):
    """Part of a run: one attempt with the wait before it, and only the time from ``since`` (UTC epoch s) on."""

    attempt: int | None = None
    since: float = -math.inf


WHOLE_RUN = TimeRange()


def compute_goodput(
    run: RunDir,
    history: Sequence[Attempt],
    now: float,
    is_finished: bool,
    *,
    is_queued: bool = False,
    time_range: TimeRange = WHOLE_RUN,
) -> Goodput:
    """Return the time by category up to ``now`` (UTC epoch s), or up to the end of the run if it ``is_finished``.

    ``is_queued``: the job is in the scheduler's queue, possibly requeued without an event of the last attempt.
    """
    total = Goodput()
    log = events.for_run(run)
    submitted = events.select_last(log, event_types.Submitted)
    starts = [a.start for a in history if a.start is not None]
    submit_times = [submitted.t] if submitted else []
    # The submitting host's clock may be ahead of the first start.
    previous_end = min(submit_times + starts, default=now)
    max_step, reported = 0, False
    for i, attempt in enumerate(history):
        start = previous_end if attempt.start is None else max(attempt.start, previous_end)
        # For other attempts only the steps reached are needed.
        bucket = total if time_range.attempt in (None, attempt.n) else Goodput()
        bucket.queue_s += max(0.0, start - max(_find_queue_start(log, previous_end, start), time_range.since))
        timeline = _AttemptTimeline(run, attempt, time_range.since)
        next_start = next((a.start for a in history[i + 1 :] if a.start is not None), None)
        is_running = attempt.end is None and not is_finished and not is_queued and i == len(history) - 1
        previous_end = _estimate_attempt_end(
            attempt, start, timeline.last_seen(), next_start, now if is_running else None
        )
        max_step = timeline.add_to(bucket, (start, previous_end), max_step, is_running)
        reported = reported or timeline.has_steps()
    queue_end = now if is_queued else _find_queue_end(log, history, now, is_finished)
    if queue_end > previous_end and time_range.attempt is None:
        total.queue_s += max(0.0, queue_end - max(_find_queue_start(log, previous_end, queue_end), time_range.since))
    total.wall_s = math.fsum(getattr(total, category) for category in TIME_CATEGORIES)
    allocated_s = total.wall_s - total.queue_s
    if not reported and is_script_run(run):
        total.ratio = total.effective_ratio = None
        return total
    total.ratio = total.productive_s / total.wall_s if total.wall_s > 0 else 0.0
    total.effective_ratio = min(1.0, total.productive_s / allocated_s) if allocated_s > 0 else 0.0
    return total


def _find_queue_start(log: Sequence[events.Event], previous_end: float, until: float) -> float:
    """Return the start of the wait for the next attempt: ``previous_end``, or when the owner continued an ended run."""
    return next(
        (e.t for e in events.select(log, event_types.Continued) if previous_end <= e.t <= until),
        previous_end,
    )


def _find_queue_end(log: Sequence[events.Event], history: Sequence[Attempt], now: float, is_finished: bool) -> float:
    """Return the end of the wait after the last attempt; -inf if the run did not wait."""
    last = history[-1] if history else None
    if not is_finished:
        return now if last is None or last.ending is not None else -math.inf
    if last is not None and (last.requeued is None or state.is_settled(history)):
        return -math.inf
    cancelled = events.select_last(log, event_types.Cancelled)  # in the queue
    return cancelled.t if cancelled else -math.inf


def _estimate_attempt_end(
    attempt: Attempt, start: float, last_seen: float, next_start: float | None, now: float | None
) -> float:
    """Return the end of an attempt (UTC epoch s). ``now`` is given if the attempt is running."""
    end = attempt.end if attempt.end is not None else last_seen
    if now is not None:
        end = max(now, last_seen)
    if next_start is not None and start <= next_start:
        end = min(end, next_start)  # clocks of hosts differ, but no attempt outlasts the start of the next one
    return max(end, start)


class _AttemptTimeline:
    """Events and rows of one attempt from the time ``since`` on."""

    def __init__(self, run: RunDir, attempt: Attempt, since: float) -> None:
        self._attempt = attempt
        self._since = since
        self._is_watched = run.watched.exists()
        self._log = events.for_attempt(run.attempt(attempt.n))
        # Within a file steps rise; each rollback starts another file.
        self._files = [
            (path, row) for path in run.metrics_files(attempt.n) if (row := _read_last_timed_row(path)) is not None
        ]
        self._last = self._files[-1][1] if self._files else None

    def last_seen(self) -> float:
        times = [float(e["t"]) for e in self._log[-1:]]
        times += [float(self._last["t"])] if self._last else []
        return max(times, default=-math.inf)

    def has_steps(self) -> bool:
        return self._first_step() is not None

    def add_to(self, total: Goodput, span: tuple[float, float], max_step: int, is_running: bool) -> int:
        """Add this attempt's seconds to ``total``; return the newest step that the run has reached."""
        start, end = span
        first_step_start = self._first_step()
        if first_step_start is None:
            self._add_without_steps(total, span)
            return max_step
        train_start = min(max(first_step_start, start), end)
        train_end = min(max(float(self._last["t"]), train_start), end) if self._last else train_start
        self._add_span(total, (start, train_start), "startup_s")
        self._add_span(total, (train_start, train_end), "other_s", self._sum_steps(max_step, train_start))
        is_clean_exit = (
            events.select_last(self._log, event_types.StopAgreed) is not None
            or self._attempt.ending == endings.COMPLETED
        )
        self._add_span(
            total, (train_end, end), "other_s" if is_running else "shutdown_s" if is_clean_exit else "lost_s"
        )
        return max([max_step, *(int(last["step"]) for _, last in self._files)])

    def _first_step(self) -> float | None:
        """Return the start of the first step (UTC epoch s); None if there was no step."""
        event = next(events.select(self._log, event_types.FirstStep), None)
        if event is not None:
            return event.t if event.t_begin is None else event.t_begin
        # The event is lost if the disk was full.
        row = next(iter(metrics_file.read_first(self._files[0][0])), {}) if self._files else {}
        t, step_s = row.get("t"), row.get("step_s", 0.0)
        return t - step_s if isinstance(t, (int, float)) and isinstance(step_s, (int, float)) else None

    def _add_without_steps(self, total: Goodput, span: tuple[float, float]) -> None:
        """Add an attempt that was killed during startup, or a program that reports no steps."""
        session = events.select_last(self._log, event_types.SessionStarted)
        ranks_up = session or events.select_last(self._log, event_types.RanksStarted)
        start, end = span
        if self._is_watched:
            self._add_span(total, span, "other_s")
            return
        if ranks_up is None or (session is not None and self._attempt.ending != endings.COMPLETED):
            self._add_span(total, span, "startup_s")
            return
        startup_end = min(max(ranks_up.t, start), end)
        self._add_span(total, (start, startup_end), "startup_s")
        self._add_span(total, (startup_end, end), "other_s")

    def _add_span(
        self, total: Goodput, span: tuple[float, float], remainder: str, steps: dict[str, float] | None = None
    ) -> None:
        """Add the measured parts within ``span``, scaled down if they exceed it; the rest goes to ``remainder``."""
        span = max(span[0], self._since), max(span[1], self._since)
        length_s = span[1] - span[0]
        measured = {
            "restore_s": sum(
                self._sum_overlap(span, name, "restore_s", "restore_s") for name in ("restored", "rolled_back")
            ),
            "checkpoint_stall_s": self._sum_overlap(span, "checkpoint", "stall_s", "save_s"),
            "evaluation_s": self._sum_overlap(span, "evaluation", "eval_s", "eval_s"),
            **(steps or {}),
        }
        data_wait_s = measured.pop("data_wait_s", 0.0)
        measured_s = math.fsum(measured.values())
        scale = length_s / measured_s if measured_s > length_s else 1.0
        for category, seconds in measured.items():
            setattr(total, category, getattr(total, category) + seconds * scale)
        setattr(total, remainder, getattr(total, remainder) + max(0.0, length_s - measured_s * scale))
        total.data_wait_s += data_wait_s * scale

    def _sum_overlap(self, span: tuple[float, float], name: str, key: str, fallback_key: str) -> float:
        """Return the seconds within ``span`` that events of one name cover.

        Events of older versions lack ``t_begin``; they began ``fallback_key`` seconds before they were written.
        """
        overlaps = []
        for event in events.filter_by_name(self._log, name):
            seconds = max(0.0, float(event.get(key) or 0.0))
            start = float(
                event.get("t_begin") or float(event["t"]) - max(seconds, float(event.get(fallback_key) or 0.0))
            )
            overlaps.append(max(0.0, min(start + seconds, span[1]) - max(start, span[0])))
        return math.fsum(overlaps)

    def _sum_steps(self, max_step: int, train_start: float) -> dict[str, float]:
        """Return the seconds of the steps by category, from the rows."""
        if self._last is None:
            return {}
        if train_start < self._since:
            return _sum_steps_since(self._files, self._since, max_step)
        steps_s, repeated_s, first_repeated_s = _sum_attempt_steps(self._files, max_step)
        warm_s = min(_measure_warmup_s(self._files[0][0]), steps_s)
        # If the first file has repeated steps, the attempt's first step is one of them.
        warm_repeated_s = min(warm_s, first_repeated_s)
        productive_s = max(0.0, steps_s - repeated_s - (warm_s - warm_repeated_s))
        repeated_s -= warm_repeated_s
        wait_s = min(max(0.0, float(self._last.get("sum_data_wait_s") or 0.0)), productive_s + repeated_s)
        return {"productive_s": productive_s, "repeated_s": repeated_s, "startup_s": warm_s, "data_wait_s": wait_s}


def _read_last_timed_row(path: Path) -> metrics_file.Row | None:
    """Return the newest row if it has a time."""
    last = metrics.read_last_row(path)
    return last if last is not None and isinstance(last.get("t"), (int, float)) else None


def _sum_attempt_steps(files: Sequence[tuple[Path, metrics_file.Row]], max_step: int) -> tuple[float, float, float]:
    """Return the seconds of all steps of an attempt, of its repeated steps, and of those in the first file."""
    total = repeated = first_repeated = 0.0
    for i, (path, last) in enumerate(files):
        seconds, file_repeated = _sum_file_steps(path, last, max_step, total)
        total, repeated = total + seconds, repeated + file_repeated
        first_repeated = first_repeated if i else file_repeated
        max_step = max(max_step, int(last["step"]))
    return total, repeated, first_repeated


def _sum_file_steps(path: Path, last: metrics_file.Row, max_step: int, previous_total: float) -> tuple[float, float]:
    """Return the seconds of all steps in one file and of its repeated steps.

    ``previous_total`` is the attempt's running total at the start of the file.
    """
    total = last.get("sum_step_s")
    if isinstance(total, (int, float)):
        newest = (metrics_file.find_row_at(path, max_step) if max_step > 0 else None) or {}
        repeated = float(newest.get("sum_step_s") or 0.0) - previous_total if newest else 0.0
        total -= previous_total
    else:  # rows of an older version
        columns = metrics_file.read_columns(path, ("step", "step_s"))
        pairs = [(n, s) for n, s in zip(columns["step"], columns["step_s"], strict=True) if math.isfinite(s)]
        total = math.fsum(s for _, s in pairs)
        repeated = math.fsum(s for n, s in pairs if n <= max_step)
    total = max(0.0, float(total))
    return total, min(max(0.0, repeated), total)


def _sum_steps_since(files: Sequence[tuple[Path, metrics_file.Row]], since: float, max_step: int) -> dict[str, float]:
    """Return the seconds of the steps since ``since``, by category; the step in progress then counts in part."""
    sums = dict.fromkeys(("productive_s", "repeated_s", "startup_s", "data_wait_s"), 0.0)
    for n, (path, last) in enumerate(files):
        columns = metrics_file.read_columns(path, ("step", "t", "step_s", "data_wait_s"))
        for i, (step, t, step_s, wait_s) in enumerate(zip(*columns.values(), strict=True)):
            if t > since and step_s > 0:
                inside_s = min(step_s, t - since)
                warm_s = min(_measure_warmup_s(path), inside_s) if n == i == 0 else 0.0
                sums["startup_s"] += warm_s
                sums["repeated_s" if step <= max_step else "productive_s"] += inside_s - warm_s
                sums["data_wait_s"] += min(wait_s, step_s) * inside_s / step_s if wait_s > 0 else 0.0
        max_step = max(max_step, int(last["step"]))
    return sums


def _measure_warmup_s(path: Path) -> float:
    """Return the seconds by which an attempt's first step exceeded the median of the next ones.

    They are spent on compilation, kernel selection and the first batch.
    """
    min_steps, max_steps = BASELINE_STEPS
    raw_times = [row.get("step_s") for row in metrics_file.read_first(path, min_rows=max_steps + 1)[: max_steps + 1]]
    step_times = [float(s) for s in raw_times if isinstance(s, (int, float))]
    return max(0.0, step_times[0] - statistics.median(step_times[1:])) if len(step_times) > min_steps else 0.0

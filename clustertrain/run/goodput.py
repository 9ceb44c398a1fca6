"""Where the time of a run went, over all attempts. The parts sum to the wall time.

The frame is UTC, as the batch hosts and the submitting host wrote it; what fills it was measured by rank 0's monotonic
clock. An attempt ends at the latest where the next one starts, and where a clock was set, so that more was measured
than there is room for, the parts of that stretch shrink alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from clustertrain.run import endings, events, metrics, metrics_file, state
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import is_script

PARTS = (
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
USUAL_STEPS = (3, 30)  # so many after an attempt's first one tell how long that should have taken


class Goodput(msgspec.Struct, kw_only=True):
    """Seconds; :data:`PARTS` are those that sum to ``wall_s``, the time from submission to now or to the run's end
    without that in which it had ended and nobody had continued it.

    ``ratio`` is productive over wall time, ``effective_ratio`` (effective training time ratio) productive over the time
    in which the job had its nodes: the wall time without the queue. Both are None of a script that has reported no
    step: what it did is not known, and its time is in ``other_s``. ``data_wait_s`` is within the steps, productive or
    repeated: rank 0's wait for its loaders.
    """

    wall_s: float = 0.0
    queue_s: float = 0.0  # waiting for a start
    startup_s: float = 0.0  # to the first step, without the restore, and what warming up added to that step
    restore_s: float = 0.0
    productive_s: float = 0.0  # steps that count
    repeated_s: float = 0.0  # steps done before and lost
    checkpoint_stall_s: float = 0.0
    evaluation_s: float = 0.0
    other_s: float = 0.0  # between two steps, in the step under way now, or in a script without session.steps
    shutdown_s: float = 0.0  # from the last step to the end of the attempt, where it ended by agreement
    lost_s: float = 0.0  # the same where it was killed: a part of a step, a hang, the wait for the node
    ratio: float | None = 0.0
    effective_ratio: float | None = 0.0
    data_wait_s: float = 0.0


class Stretch(NamedTuple):
    """A part of a run: one attempt with the wait before it, and only from ``since`` (UTC epoch s) on."""

    attempt: int | None = None
    since: float = -math.inf


ALL = Stretch()


def ledger(
    run: RunDir,
    history: Sequence[Attempt],
    now: float,
    finished: bool,
    *,
    waiting: bool = False,
    of: Stretch = ALL,
) -> Goodput:
    """The ledger up to ``now`` (UTC epoch s), or up to the end where the run has ``finished``. ``waiting``: its job is
    in the scheduler's queue, perhaps put back without a word of the last attempt."""
    total = Goodput()
    log = events.of_run(run)
    submitted = events.last(log, "submitted")
    starts = [a.start for a in history if a.start is not None]
    begins = [float(submitted["t"])] if submitted else []
    edge = min(begins + starts, default=now)  # the submitting host's clock may be ahead of the first start
    reached, reported = 0, False
    for i, attempt in enumerate(history):
        start = edge if attempt.start is None else max(attempt.start, edge)
        # Of the others is asked alone how far they came.
        book = total if of.attempt in (None, attempt.n) else Goodput()
        book.queue_s += max(0.0, start - max(_waits_from(log, edge, start), of.since))
        told = _Told(run, attempt, of.since)
        following = next((a.start for a in history[i + 1 :] if a.start is not None), None)
        running = attempt.end is None and not finished and not waiting and i == len(history) - 1
        edge = _end_of(attempt, start, told.last_sign(), following, now if running else None)
        reached = told.account(book, (start, edge), reached, running)
        reported = reported or told.reports_steps()
    until = now if waiting else _queued_until(log, history, now, finished)
    if until > edge and of.attempt is None:
        total.queue_s += max(0.0, until - max(_waits_from(log, edge, until), of.since))
    total.wall_s = math.fsum(getattr(total, part) for part in PARTS)
    held_s = total.wall_s - total.queue_s
    if not reported and is_script(run):
        total.ratio = total.effective_ratio = None
        return total
    total.ratio = total.productive_s / total.wall_s if total.wall_s > 0 else 0.0
    total.effective_ratio = min(1.0, total.productive_s / held_s) if held_s > 0 else 0.0
    return total


def _waits_from(log: Sequence[events.Event], edge: float, until: float) -> float:
    """When the wait for the next start began: at ``edge``, or later where the run had ended there, with a word or
    without one, and was continued by hand."""
    return next((t for e in events.named(log, "continued") if edge <= (t := float(e["t"])) <= until), edge)


def _queued_until(log: Sequence[events.Event], history: Sequence[Attempt], now: float, finished: bool) -> float:
    """Until when the run has waited after its last attempt; -inf where it has not."""
    last = history[-1] if history else None
    if not finished:
        return now if last is None or last.ending is not None else -math.inf
    if last is not None and (last.requeued is None or state.settled(history)):
        return -math.inf
    cancelled = events.last(log, "cancelled")  # in the queue
    return float(cancelled["t"]) if cancelled else -math.inf


def _end_of(attempt: Attempt, start: float, last_sign: float, following: float | None, now: float | None) -> float:
    """``now`` is given where the attempt goes on."""
    end = attempt.end if attempt.end is not None else last_sign
    if now is not None:
        end = max(now, last_sign)
    if following is not None and start <= following:
        end = min(end, following)  # by another host's clock, but no attempt outlasts the next one's start
    return max(end, start)


class _Told:
    """What one attempt's events and rows say of the time from ``since`` on."""

    def __init__(self, run: RunDir, attempt: Attempt, since: float) -> None:
        self._attempt = attempt
        self._since = since
        self._log = events.of_attempt(run.attempt(attempt.n))
        # Files of rising steps; a further one for each time that the attempt went back.
        self._files = [(path, row) for path in run.metrics_files(attempt.n) if (row := _last_of(path)) is not None]
        self._last = self._files[-1][1] if self._files else None

    def last_sign(self) -> float:
        signs = [float(e["t"]) for e in self._log[-1:]]
        signs += [float(self._last["t"])] if self._last else []
        return max(signs, default=-math.inf)

    def reports_steps(self) -> bool:
        return self._first_step() is not None

    def account(self, total: Goodput, span: tuple[float, float], reached: int, running: bool) -> int:
        """Add this attempt's seconds; returns the newest step that the run has reached."""
        start, end = span
        began = self._first_step()
        if began is None:
            self._without_steps(total, span)
            return reached
        begin = min(max(began, start), end)
        finish = min(max(float(self._last["t"]), begin), end) if self._last else begin
        self._fill(total, (start, begin), "startup_s")
        self._fill(total, (begin, finish), "other_s", self._steps(reached, begin))
        orderly = events.last(self._log, "stop_agreed") is not None or self._attempt.ending == endings.COMPLETED
        self._fill(total, (finish, end), "other_s" if running else "shutdown_s" if orderly else "lost_s")
        return max([reached, *(int(last["step"]) for _, last in self._files)])

    def _first_step(self) -> float | None:
        """When it began."""
        event = next(events.named(self._log, "first_step"), None)
        if event is not None:
            return float(event["t_begin"] if "t_begin" in event else event["t"])
        row = next(iter(metrics_file.first(self._files[0][0])), {}) if self._files else {}  # a full disk took the event
        t, step_s = row.get("t"), row.get("step_s", 0.0)
        return t - step_s if isinstance(t, (int, float)) and isinstance(step_s, (int, float)) else None

    def _without_steps(self, total: Goodput, span: tuple[float, float]) -> None:
        """Killed while it started; or a script of the user's own that trains without ``session.steps``."""
        session = events.last(self._log, "session_started")
        up = session or events.last(self._log, "ranks_started")
        start, end = span
        if up is None or (session is not None and self._attempt.ending != endings.COMPLETED):
            self._fill(total, span, "startup_s")
            return
        middle = min(max(float(up["t"]), start), end)
        self._fill(total, (start, middle), "startup_s")
        self._fill(total, (middle, end), "other_s")

    def _fill(
        self, total: Goodput, span: tuple[float, float], rest: str, steps: dict[str, float] | None = None
    ) -> None:
        """Add what lies in ``span``: what was measured, shrunk where there is not room for all of it, and in ``rest``
        what nothing else claims."""
        span = max(span[0], self._since), max(span[1], self._since)
        length = span[1] - span[0]
        claims = {
            "restore_s": sum(
                self._overlap(span, name, "restore_s", "restore_s") for name in ("restored", "rolled_back")
            ),
            "checkpoint_stall_s": self._overlap(span, "checkpoint", "stall_s", "save_s"),
            "evaluation_s": self._overlap(span, "evaluation", "eval_s", "eval_s"),
            **(steps or {}),
        }
        data_wait_s = claims.pop("data_wait_s", 0.0)
        claimed = math.fsum(claims.values())
        scale = length / claimed if claimed > length else 1.0
        for part, seconds in claims.items():
            setattr(total, part, getattr(total, part) + seconds * scale)
        setattr(total, rest, getattr(total, rest) + max(0.0, length - claimed * scale))
        total.data_wait_s += data_wait_s * scale

    def _overlap(self, span: tuple[float, float], name: str, key: str, whole: str) -> float:
        """Seconds within ``span`` of what such events tell of. Older ones lack their begin: it was ``whole`` before."""
        found = []
        for event in events.named(self._log, name):
            seconds = max(0.0, float(event.get(key) or 0.0))
            begin = float(event.get("t_begin") or float(event["t"]) - max(seconds, float(event.get(whole) or 0.0)))
            found.append(max(0.0, min(begin + seconds, span[1]) - max(begin, span[0])))
        return math.fsum(found)

    def _steps(self, reached: int, begin: float) -> dict[str, float]:
        """The steps' own seconds, from the rows."""
        if self._last is None:
            return {}
        if begin < self._since:
            return _since(self._files, self._since, reached)
        steps_s, repeated_s, first_repeated_s = _sums_of_all(self._files, reached)
        warm_s = min(_warm_up_s(self._files[0][0]), steps_s)
        # The attempt's first step is among the repeated ones where its first stretch has any.
        warm_repeated_s = min(warm_s, first_repeated_s)
        productive_s = max(0.0, steps_s - repeated_s - (warm_s - warm_repeated_s))
        repeated_s -= warm_repeated_s
        wait_s = min(max(0.0, float(self._last.get("sum_data_wait_s") or 0.0)), productive_s + repeated_s)
        return {"productive_s": productive_s, "repeated_s": repeated_s, "startup_s": warm_s, "data_wait_s": wait_s}


def _last_of(path: Path) -> metrics_file.Row | None:
    """The newest row, where it says when it was."""
    last = metrics.last_row(path)
    return last if last is not None and isinstance(last.get("t"), (int, float)) else None


def _sums_of_all(files: Sequence[tuple[Path, metrics_file.Row]], reached: int) -> tuple[float, float, float]:
    """The seconds of all steps of an attempt, of those that were done before, and of these in the first file."""
    total = repeated = first_repeated = 0.0
    for i, (path, last) in enumerate(files):
        seconds, again = _sums(path, last, reached, total)
        total, repeated = total + seconds, repeated + again
        first_repeated = first_repeated if i else again
        reached = max(reached, int(last["step"]))
    return total, repeated, first_repeated


def _sums(path: Path, last: metrics_file.Row, reached: int, before: float) -> tuple[float, float]:
    """The seconds of the steps in one file, and of those that were done before. ``before``: what the running totals of
    the attempt stood at when the file was begun."""
    total = last.get("sum_step_s")
    if isinstance(total, (int, float)):
        newest = metrics_file.at(path, reached) or {}
        again = float(newest.get("sum_step_s") or 0.0) - before if newest else 0.0
        total -= before
    else:  # of an older version
        found = metrics_file.columns(path, ("step", "step_s"))
        pairs = [(n, s) for n, s in zip(found["step"], found["step_s"], strict=True) if math.isfinite(s)]
        total = math.fsum(s for _, s in pairs)
        again = math.fsum(s for n, s in pairs if n <= reached)
    total = max(0.0, float(total))
    return total, min(max(0.0, again), total)


def _since(files: Sequence[tuple[Path, metrics_file.Row]], since: float, reached: int) -> dict[str, float]:
    """The seconds of an attempt's last steps; of the one that was under way, its share."""
    claims = dict.fromkeys(("productive_s", "repeated_s", "startup_s", "data_wait_s"), 0.0)
    for n, (path, last) in enumerate(files):
        found = metrics_file.columns(path, ("step", "t", "step_s", "data_wait_s"))
        for i, (step, t, step_s, wait_s) in enumerate(zip(*found.values(), strict=True)):
            if t > since and step_s > 0:
                inside_s = min(step_s, t - since)
                warm_s = min(_warm_up_s(path), inside_s) if n == i == 0 else 0.0
                claims["startup_s"] += warm_s
                claims["repeated_s" if step <= reached else "productive_s"] += inside_s - warm_s
                claims["data_wait_s"] += min(wait_s, step_s) * inside_s / step_s if wait_s > 0 else 0.0
        reached = max(reached, int(last["step"]))
    return claims


def _warm_up_s(path: Path) -> float:
    """By how much an attempt's first step took longer than the next ones: compilation, the choice of kernels, the
    data's first batch."""
    least, most = USUAL_STEPS
    found = [row.get("step_s") for row in metrics_file.first(path, least=most + 1)[: most + 1]]
    taken = [float(s) for s in found if isinstance(s, (int, float))]
    return max(0.0, taken[0] - statistics.median(taken[1:])) if len(taken) > least else 0.0

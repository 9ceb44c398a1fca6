"""Where the time of a run went, over all attempts. The parts sum to the wall time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from clustertrain import fsio
from clustertrain.run import events
from clustertrain.run.attempts import Attempt
from clustertrain.run.folder import RunDir


class Goodput(msgspec.Struct, kw_only=True):
    """Seconds. ``ratio`` is productive over wall time."""

    wall_s: float = 0.0
    queue_s: float = 0.0  # waiting for a start
    startup_s: float = 0.0  # from the start of the job to the first step, without the restore
    restore_s: float = 0.0
    productive_s: float = 0.0  # steps that count
    repeated_s: float = 0.0  # steps done before and lost
    checkpoint_stall_s: float = 0.0
    evaluation_s: float = 0.0
    shutdown_s: float = 0.0  # from the last step to the end of the attempt, where it ended by agreement
    lost_s: float = 0.0  # the same where it was killed
    ratio: float = 0.0


PARTS = tuple(f.name for f in msgspec.structs.fields(Goodput) if f.name not in ("wall_s", "ratio"))


def ledger(run: RunDir, history: Sequence[Attempt], now: float, finished: bool) -> Goodput:
    """The ledger up to ``now``, or up to the last attempt's end when the run has ended."""
    total = Goodput()
    submitted = events.last(events.of_run(run), "submitted")
    edge = float(submitted["t"]) if submitted else (history[0].start or now if history else now)
    begin = edge
    reached = 0
    for attempt in history:
        start = max(attempt.start or edge, edge)
        end = max(attempt.end or now, start)
        total.queue_s += start - edge
        reached = _account(run, attempt, (start, end), reached, total)
        edge = end
    if not finished and (not history or history[-1].ending is not None):
        total.queue_s += max(0.0, now - edge)
        edge = max(now, edge)
    total.wall_s = edge - begin
    total.ratio = total.productive_s / total.wall_s if total.wall_s > 0 else 0.0
    return total


def _account(run: RunDir, attempt: Attempt, span: tuple[float, float], reached: int, total: Goodput) -> int:
    """Add one attempt's seconds to ``total``; returns the newest step that the run has reached."""
    start, end = span
    log = events.of_attempt(run.attempt(attempt.n))
    first, restored = events.last(log, "first_step"), events.last(log, "restored")
    restore_s = float(restored.get("restore_s", 0.0)) if restored else 0.0
    rows = [r for r in fsio.read_lines(run.metrics_of(attempt.n)) if "step" in r and "t" in r]
    # Both clocks are UTC, of two hosts perhaps: nothing may leave the attempt's span.
    begin_steps = min(max(float(first["t"]), start), end) if first else end
    last_step = min(max(float(rows[-1]["t"]), begin_steps), end) if rows else begin_steps
    restore_s = min(restore_s, begin_steps - start)
    total.restore_s += restore_s
    total.startup_s += begin_steps - start - restore_s
    training = last_step - begin_steps
    for name, key, event in (("checkpoint_stall_s", "stall_s", "checkpoint"), ("evaluation_s", "eval_s", "evaluation")):
        spent = sum(
            float(e.get(key, 0.0)) for e in events.named(log, event) if begin_steps <= float(e["t"]) <= last_step
        )
        spent = min(spent, training)
        setattr(total, name, getattr(total, name) + spent)
        training -= spent
    again = sum(1 for r in rows if int(r["step"]) <= reached)
    repeated = training * again / len(rows) if rows else 0.0
    total.repeated_s += repeated
    total.productive_s += training - repeated
    orderly = attempt.ending is None or events.last(log, "stop_agreed") is not None or attempt.ending == "completed"
    name = "shutdown_s" if orderly else "lost_s"
    setattr(total, name, getattr(total, name) + end - last_step)
    return max([reached, *(int(r["step"]) for r in rows)])

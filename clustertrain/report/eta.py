"""Estimate a running job's speed and remaining time from its newest metric rows and events."""

from __future__ import annotations

from typing import Any

from clustertrain.run import json_files
from clustertrain.run.events import Event

RECENT_S = 600.0  # the window over which the rate is averaged


def recent_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the last ``RECENT_S`` seconds."""
    return [r for r in rows if float(r["t"]) >= float(rows[-1]["t"]) - RECENT_S]


def estimate(
    rows: list[dict[str, Any]], log: list[Event], step: int | None, total: int | None, now: float | None
) -> dict[str, Any]:
    """Return the current speed and the estimated remaining time, as fields of ``RunView``.

    Args:
        rows: the recent metric rows, oldest first.
        log: the events of the attempt, by time.
        step: the number of completed steps.
        total: the number of steps to complete.
        now: UTC epoch s; None for a run that has ended.
    """
    if not rows:
        return {}
    step_s, last_t = _step_s(rows), float(rows[-1]["t"])
    overhead = _overhead(log, last_t)
    eta = None
    if now is not None and step_s is not None and step is not None and total is not None and total >= step:
        eta = (total - step) * step_s * (1 + (overhead or 0.0))
    rates = [rate for r in rows if (rate := as_finite(r.get("tokens_per_s"))) is not None]
    return {
        "step_s": step_s,
        "tokens_per_s": sum(rates) / len(rates) if rates else None,
        "loss": as_finite(rows[-1].get("loss")),
        "since_step_s": None if now is None else max(0.0, now - last_t),
        "eta_s": eta,
        "overhead": overhead,
    }


def as_finite(value: object) -> float | None:
    """Return a number of a row as a float; None if it is none, NaN, Inf or too large."""
    return float(value) if json_files.is_number(value) else None


def _step_s(rows: list[dict[str, Any]]) -> float | None:
    times = [s for r in rows if (s := as_finite(r.get("step_s"))) is not None and s >= 0]
    if times:
        return sum(times) / len(times)
    steps = int(rows[-1]["step"]) - int(rows[0]["step"])  # a script may not log every step
    return (float(rows[-1]["t"]) - float(rows[0]["t"])) / steps if steps > 0 else None


def _overhead(log: list[Event], until: float) -> float | None:
    """Return seconds of checkpoints and evaluations per second of training, or None if there were none.

    The period starts at the first step, or at the oldest event if ``log`` does not reach back to it.
    """
    pauses = [(float(e["t"]), float(e.get("stall_s") or e.get("eval_s") or 0.0)) for e in log
             if e["event"] in ("checkpoint", "evaluation")]  # fmt: skip
    if not pauses:
        return None
    first_step_t = next((float(e["t"]) for e in log if e["event"] == "first_step"), None)
    start = pauses[0][0] - pauses[0][1] if first_step_t is None else first_step_t
    pause_s = sum(s for t, s in pauses if t <= until)
    train_s = until - start - pause_s
    return pause_s / train_s if train_s > 60 else None

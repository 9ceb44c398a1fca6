"""``submit --follow``: a progress bar and the run's events, until it ends. On a pipe: plain lines."""

from __future__ import annotations

import sys
from typing import Any

import click

from clustertrain import clock
from clustertrain.report.event_text import in_words
from clustertrain.run import events, metrics
from clustertrain.run.run_dir import RunDir

POLL_S = 0.25
ASK_S = 2.0
# Of those that concern this node or that GPU, `top` and `telemetry` tell.
_NOT_HERE = ("gpu_lost", "gpu_back", "telemetry_failed", "alert", "alert_not_delivered")


def _line(n: int, event: dict[str, Any]) -> str | None:
    name = event["event"]
    words = None if name in _NOT_HERE else in_words(event)
    return words if words is None or name == "stopped" else f"attempt {n}: {words}"


class _News:
    """The events that were not told yet."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.told: dict[int, set[tuple[float, str, int]]] = {}
        self.signalled: set[tuple[int, str]] = set()

    def lines(self) -> list[str]:
        out = []
        for attempt in self.run.attempts():
            seen = self.told.setdefault(attempt.n, set())
            for event in events.of_attempt(attempt):
                key = (float(event["t"]), str(event["event"]), int(event.get("pid", 0)))
                if key in seen:
                    continue
                seen.add(key)
                if event["event"] == "signal":
                    # Every agent tells of it; once is enough.
                    once = (attempt.n, "signal")
                    if once in self.signalled:
                        continue
                    self.signalled.add(once)
                line = _line(attempt.n, event)
                if line:
                    out.append(line)
        return out


def follow(run: RunDir) -> int:
    """Show the run until it ends; the exit code is 0 only for completed. An interrupt ends the showing, not the run."""
    try:
        return _follow(run)
    except KeyboardInterrupt:
        click.echo(f"{run.id} goes on; `clustertrain cancel {run.id}` would end it", err=True)
        return 130


def _follow(run: RunDir) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from clustertrain.report.terminal import make_console
    from clustertrain.scheduler.run_status import look

    out = make_console(sys.stderr)
    news = _News(run)
    seen = look(run)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        task = bar.add_task(seen.state, total=seen.total_steps)
        next_ask = clock.monotonic() + ASK_S
        while True:
            # Asked before the news are read, so that the last news are told too.
            if clock.monotonic() >= next_ask:
                next_ask = clock.monotonic() + ASK_S
                seen = look(run)
            for line in news.lines():
                bar.console.print(line, highlight=False, markup=False)
            row = metrics.latest(run)
            if row:
                words = f"{seen.state}  loss {row['loss']:.3f}" if "loss" in row else seen.state
                bar.update(task, completed=int(row["step"]), total=seen.total_steps, description=words)
            if seen.final:
                bar.update(task, description=seen.state)
                break
            clock.sleep(POLL_S)
    out.print(f"{run.id}: {seen.state}", highlight=False)
    return 0 if seen.state == "completed" else 1

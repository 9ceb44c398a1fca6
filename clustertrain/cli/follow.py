"""``submit --follow``: show progress and events until the run ends; plain lines on a pipe."""

from __future__ import annotations

import sys
from typing import Any

import click

from clustertrain import clock
from clustertrain.report.event_text import format_event
from clustertrain.run import events, metrics
from clustertrain.run.run_dir import RunDir

POLL_S = 0.25
STATUS_INTERVAL_S = 2.0
# Events of one node or GPU: `top` and `telemetry` show them.
_HIDDEN_EVENTS = ("gpu_lost", "gpu_back", "telemetry_failed", "alert", "alert_not_delivered")


def _format_event(n: int, event: dict[str, Any]) -> str | None:
    name = event["event"]
    text = None if name in _HIDDEN_EVENTS else format_event(event)
    return text if text is None or name == "stopped" else f"attempt {n}: {text}"


class _UnreportedEvents:
    """Tracks which events were already shown."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.reported: dict[int, set[tuple[float, str, int]]] = {}
        self.reported_signals: set[tuple[int, str]] = set()

    def new_lines(self) -> list[str]:
        lines = []
        for attempt in self.run.attempts():
            attempt_keys = self.reported.setdefault(attempt.n, set())
            for event in events.for_attempt(attempt):
                key = (float(event["t"]), str(event["event"]), int(event.get("pid", 0)))
                if key in attempt_keys:
                    continue
                attempt_keys.add(key)
                if event["event"] == "signal":
                    # Every agent reports it; one line is enough.
                    signal_key = (attempt.n, "signal")
                    if signal_key in self.reported_signals:
                        continue
                    self.reported_signals.add(signal_key)
                line = _format_event(attempt.n, event)
                if line:
                    lines.append(line)
        return lines


def follow_run(run: RunDir) -> int:
    """Show the run until it ends; return 0 only if it completed. Ctrl-C stops the display, not the run."""
    try:
        return _follow(run)
    except KeyboardInterrupt:
        click.echo(f"{run.id} continues; `clustertrain cancel {run.id}` ends it", err=True)
        return 130


def _follow(run: RunDir) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from clustertrain.report.terminal import make_console
    from clustertrain.scheduler.run_status import run_status

    console = make_console(sys.stderr)
    unreported = _UnreportedEvents(run)
    status = run_status(run)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(status.state, total=status.total_steps)
        next_poll = clock.monotonic() + STATUS_INTERVAL_S
        while True:
            # Before reading the events, so that the last ones are shown too.
            if clock.monotonic() >= next_poll:
                next_poll = clock.monotonic() + STATUS_INTERVAL_S
                status = run_status(run)
            for line in unreported.new_lines():
                bar.console.print(line, highlight=False, markup=False)
            row = metrics.find_latest_row(run)
            if row:
                description = f"{status.state}  loss {row['loss']:.3f}" if "loss" in row else status.state
                bar.update(task, completed=int(row["step"]), total=status.total_steps, description=description)
            if status.is_final:
                bar.update(task, description=status.state)
                break
            clock.sleep(POLL_S)
    console.print(f"{run.id}: {status.state}", highlight=False)
    return 0 if status.state == "completed" else 1

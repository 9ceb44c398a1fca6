"""``submit --follow``: show progress and events until the run ends; plain lines on a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from clustertrain import clock
from clustertrain.cli.common import echo_next_steps
from clustertrain.durations import format_duration
from clustertrain.report.event_text import format_event
from clustertrain.run import events, metrics, state
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_command

if TYPE_CHECKING:
    from clustertrain.report.progress import Progress
    from clustertrain.scheduler.run_status import RunStatus

BAR_WIDTH = 20  # with the rest, at most 80 columns
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
        self.startup_phase = ""
        """What the newest attempt does before its first step; empty afterwards."""

    def new_lines(self) -> list[str]:
        lines = []
        for attempt in self.run.attempts():
            attempt_keys = self.reported.setdefault(attempt.n, set())
            log = events.for_attempt(attempt)
            self.startup_phase = _find_startup_phase({str(e["event"]) for e in log})
            for event in log:
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


def _find_startup_phase(names: set[str]) -> str:
    """Return what an attempt with these events does before its first step."""
    if names & {"first_step", "ended"}:
        return ""
    return "loading" if "session_started" in names else "starting ranks"


def _describe(status: RunStatus, progress: Progress, startup_phase: str) -> str:
    """Return the state with loss and time left: ``running  loss 2.75  3m04s left``.

    Before the first step, return the phase of the start-up, or what the job waits for in the queue.
    """
    from clustertrain.report.status import format_loss, format_wait

    if waits_for := format_wait(status):
        return f"{status.shown_state}: {waits_for}"
    if status.state == state.RUNNING and startup_phase:
        return f"{status.shown_state}: {startup_phase}"
    loss = "" if progress.loss is None else f"loss {format_loss(progress.loss)}"
    left = "" if progress.eta_s is None else f"{format_duration(progress.eta_s)} left"
    return "  ".join(part for part in (status.shown_state, loss, left) if part)


def follow_run(run: RunDir) -> int:
    """Show the run until it ends; return 0 only if it completed. Ctrl-C stops the display, not the run."""
    try:
        return _follow(run)
    except KeyboardInterrupt:
        click.echo(f"{run.id} continues; `clustertrain cancel {run.id}` ends it", err=True)
        return 130


def _follow(run: RunDir) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    from clustertrain.report.progress import Progress, load_progress
    from clustertrain.report.terminal import make_console
    from clustertrain.scheduler.run_status import run_status

    console = make_console(sys.stderr)
    unreported = _UnreportedEvents(run)
    is_command = load_command(run) is not None  # which may report no steps, so that its start-up has no known end
    status, next_poll, progress = run_status(run), clock.monotonic() + STATUS_INTERVAL_S, Progress()
    columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(status.shown_state, total=status.total_steps)
        while True:
            # Before reading the events, so that the last ones are shown too.
            if clock.monotonic() >= next_poll:
                next_poll = clock.monotonic() + STATUS_INTERVAL_S
                status = run_status(run)
                progress = load_progress(status, clock.now(), with_failure=False)
            for line in unreported.new_lines():
                bars.console.print(line, highlight=False, markup=False)
            if not bars.disable:
                row = metrics.find_latest_row(run)
                phase = "" if is_command else unreported.startup_phase
                completed = int(row["step"]) if row else 0
                description = _describe(status, progress, phase)
                bars.update(task, completed=completed, total=status.total_steps, description=description)
            if status.is_final:
                break
            clock.sleep(POLL_S)
    console.print(f"{run.id}: {status.state}", highlight=False)
    if status.state == state.FAILED:
        echo_next_steps(run)
    return 0 if status.state == "completed" else 1

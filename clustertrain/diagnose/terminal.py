"""Show the findings of a diagnosis in a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clustertrain import clock
from clustertrain.diagnose import plots
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.runner import Diagnosis
from clustertrain.durations import format_duration
from clustertrain.report.terminal import UNICODE, emit, glyphs, make_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

_STYLES: dict[Verdict, str] = {"pass": "green", "warn": "yellow", "fail": "bold red", "skipped": "blue"}
_MAX_PLOT_WIDTH = 100


def show_finding(console: Console, finding: Finding) -> None:
    """Print one finding: the verdict, its reason, the numbers and the fix."""
    parts: list[RenderableType] = [_headline(finding)]
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for name, value in finding.rows:
        table.add_row(name, value)
    if finding.fix:
        table.add_row(Text("fix", "bold"), finding.fix)
    if table.row_count:
        parts.append(Padding(table, (0, 0, 0, 2)))
    if finding.plot is not None and len(finding.plot.x) > 1:
        plain = {} if glyphs(console) is UNICODE else {"dot": "*", "line": "-", "side": "|"}
        width = min(console.width, _MAX_PLOT_WIDTH) - 4
        parts.append(Padding("\n".join(plots.render_text(finding.plot, width, **plain)), (0, 0, 0, 2)))
    emit(console, *parts, "")


def _headline(finding: Finding) -> Table:
    line = Table.grid(padding=(0, 2))
    line.add_column(width=7)
    line.add_column(width=10)
    line.add_column(overflow="fold", ratio=1)
    line.add_row(Text(finding.verdict, _STYLES[finding.verdict]), Text(finding.check, "bold"), finding.text)
    return line


def show_summary(console: Console, result: Diagnosis) -> None:
    """Print the number of checks per verdict."""
    counts = [f"{n} {v}" for v in _STYLES if (n := sum(f.verdict == v for f in result.checks))]
    emit(console, f"{result.recipe} on {result.device}: {', '.join(counts)}")


class CheckProgressBar:
    """A progress bar on stderr, shown only on a terminal and erased at the end of the ``with`` block.

    It shows the current check, the time left of it, and the time of all checks so far.
    """

    def __init__(self, checks: int) -> None:
        self._checks = checks
        self._begin = clock.monotonic()
        self._started_checks: dict[str, float] = {}  # monotonic time of the first progress
        self._left_s = 0.0  # of the current check; 0 if unknown
        self._progress: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> CheckProgressBar:
        if sys.stderr.isatty():
            self._progress = self._start("starting")  # at once: importing torch over a network file system is slow
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.hide()

    def hide(self) -> None:
        """Erase the bar until the next progress, so that other lines can be printed."""
        if self._progress is not None:
            self._progress[0].stop()
            self._progress = None
        self._left_s = 0.0

    def __call__(self, check: str, completed: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        now = clock.monotonic()
        spent_s = now - self._started_checks.setdefault(check, now)
        description = f"{check} ({len(self._started_checks)} of {self._checks})" if self._checks > 1 else check
        if self._progress is None:
            self._progress = self._start(description)
        progress, task = self._progress
        self._left_s = spent_s * (total - completed) / completed if completed else 0.0
        progress.update(task, description=description, completed=completed, total=total or None)

    def _start(self, description: str) -> tuple[Progress, TaskID]:
        from rich.progress import BarColumn, Progress, RenderableColumn, TaskProgressColumn, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            RenderableColumn(self),
        )
        progress = Progress(*columns, console=make_console(sys.stderr), transient=True)
        progress.start()
        return progress, progress.add_task(description, total=None)

    def __rich__(self) -> str:
        """Return the times; the bar asks several times a second, so that they go on during a long step."""
        left = f"{format_duration(self._left_s)} left, " if self._left_s >= 1 else ""
        return f"{left}{format_duration(clock.monotonic() - self._begin)} so far"

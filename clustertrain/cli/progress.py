"""A progress bar on stderr for long work."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from clustertrain import clock

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOW_AFTER_S = 1.0


class ProgressBar:
    """A progress bar, called with the bytes done and the total.

    It appears after one second, only if stderr is a terminal, and disappears at the end of the ``with`` block.
    """

    def __init__(self, description: str) -> None:
        self.description = description
        self._started = clock.monotonic()
        self._progress: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress[0].stop()

    def __call__(self, completed: int, total: int) -> None:
        if self._progress is None:
            if completed >= total or clock.monotonic() - self._started < SHOW_AFTER_S or not sys.stderr.isatty():
                return
            self._progress = self._start()
        progress, task = self._progress
        progress.update(task, description=self.description, completed=completed, total=total)

    def _start(self) -> tuple[Progress, TaskID]:
        # Not at the top: most commands finish before the bar appears.
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from clustertrain.report.terminal import make_console

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        progress = Progress(*columns, console=make_console(sys.stderr), transient=True)
        progress.start()
        return progress, progress.add_task(self.description, total=None)

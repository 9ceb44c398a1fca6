"""A bar on stderr for work that lasts."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from clustertrain import clock

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOW_AFTER_S = 1.0


class ProgressBar:
    """Called with the bytes that are done and those there are. It shows when a second has gone by, and where stderr is
    a terminal; at the end of the ``with`` it is wiped away."""

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
        # Not at the top: most commands are done before there is anything to show.
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from clustertrain.report.terminal import make_console

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        progress = Progress(*columns, console=make_console(sys.stderr), transient=True)
        progress.start()
        return progress, progress.add_task(self.description, total=None)

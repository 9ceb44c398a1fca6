"""A bar on stderr for work that lasts."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from clustertrain import clock

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 1.0


class Bar:
    """Called with the bytes that are done and those there are. It shows when a second has gone by, and where stderr is
    a terminal; at the end of the ``with`` it is wiped away."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._begin = clock.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        if self._shown is not None:
            self._shown[0].stop()

    def __call__(self, done: int, total: int) -> None:
        if self._shown is None:
            if done >= total or clock.monotonic() - self._begin < PATIENCE_S or not sys.stderr.isatty():
                return
            self._shown = self._show()
        progress, task = self._shown
        progress.update(task, description=self.what, completed=done, total=total)

    def _show(self) -> tuple[Progress, TaskID]:
        # Not at the top: most commands are done before there is anything to show.
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from clustertrain.report.terminal import make_console

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        progress = Progress(*columns, console=make_console(sys.stderr), transient=True)
        progress.start()
        return progress, progress.add_task(self.what, total=None)

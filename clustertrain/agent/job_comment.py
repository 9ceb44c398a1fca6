"""Keeps the line of figures in the job's comment new, in a thread of batch: the report of a large run takes seconds to
read, and batch has signals to heed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.job_comment import EVERY_S, FIRST_S, Figures, JobComment, comment_of
from clustertrain.scheduler.run_status import total_steps
from clustertrain.telemetry.report_schema import Stats, Summary


class Commenter:
    """``text`` gives the line; it is called in the thread, and what it raises costs that one update."""

    def __init__(
        self, comment: JobComment, text: Callable[[], str], first_s: float = FIRST_S, every_s: float = EVERY_S
    ) -> None:
        self._comment = comment
        self._text = text
        self._first_s = first_s
        self._every_s = every_s
        self._last = threading.Event()
        self._quiet = threading.Event()
        self._thread = threading.Thread(target=self._run, name="comment", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as e:  # the limit on processes is reached
            print(f"clustertrain batch: no comment in the job: {e}", file=sys.stderr, flush=True)

    def quiet(self) -> None:
        """The ranks have been told to stop: no report is read any more but the last, if it is asked for."""
        self._quiet.set()

    def finish(self, timeout_s: float) -> None:
        """A last update. Not for an attempt that is to be continued: its job keeps the comment, and has no time."""
        self._last.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._last.wait(wait_s):
            if not self._quiet.is_set():
                self._update()
            wait_s = self._every_s
        self._update()

    def _update(self) -> None:
        if self._comment.refused:
            return
        try:
            self._comment.update(self._text())
        except Exception as e:  # the thread's edge: a comment must not end the run
            print(f"clustertrain batch: the job's comment: {type(e).__name__}: {e}", file=sys.stderr, flush=True)


def line_of(run: RunDir) -> str:
    """The line for a run as it is now."""
    # Not at the top: numpy, for a batch process that may never comment.
    from clustertrain.telemetry.analysis.summarize import summarize

    return comment_of(figures_of(run, summarize(run)))


def figures_of(run: RunDir, summary: Summary) -> Figures:
    row: dict[str, Any] = metrics.latest(run) or {}
    used = [(g.memory_used_gib.max, g.memory_total_gib) for g in summary.gpus if g.memory_used_gib is not None]
    most, there_is = max(used, key=lambda found: found[0], default=(None, None))
    return Figures(
        run=run.id,
        step=None if row.get("step") is None else int(row["step"]),
        total_steps=total_steps(run),
        gpu_utilization=_mean(g.utilization for g in summary.gpus),
        memory_used_gib=most,
        memory_total_gib=there_is,
        power_w=_mean(g.power_w for g in summary.gpus),
        goodput=None if summary.goodput is None else summary.goodput.ratio,
        notes=sum(note.severity != "info" for note in summary.notes),
    )


def _mean(found: Iterable[Stats | None]) -> float | None:
    means = [stats.mean for stats in found if stats is not None]
    return sum(means) / len(means) if means else None

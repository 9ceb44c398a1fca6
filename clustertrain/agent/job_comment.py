"""Updates of the job's comment, in a thread of the batch process: reading the report of a large run takes seconds, in
which the batch process must handle signals."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.job_comment import (
    FIRST_UPDATE_S,
    UPDATE_INTERVAL_S,
    CommentMetrics,
    JobComment,
    format_comment,
)
from clustertrain.scheduler.run_status import total_steps
from clustertrain.telemetry.report_schema import Stats, Summary


class CommentUpdater:
    """Updater of the comment. It calls ``format_text`` in its thread; an exception costs that update only."""

    def __init__(
        self,
        comment: JobComment,
        format_text: Callable[[], str],
        first_s: float = FIRST_UPDATE_S,
        every_s: float = UPDATE_INTERVAL_S,
    ) -> None:
        self._comment = comment
        self._format_text = format_text
        self._first_s = first_s
        self._every_s = every_s
        self._finishing = threading.Event()
        self._suspended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="comment", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as e:  # the limit on processes is reached
            print(f"clustertrain batch: no comment in the job: {e}", file=sys.stderr, flush=True)

    def suspend(self) -> None:
        """Stop regular updates, since the ranks are stopping. :meth:`finish` still updates."""
        self._suspended.set()

    def finish(self, timeout_s: float) -> None:
        """Update a last time. Not for an attempt that continues: its job keeps the comment, and has no time."""
        self._finishing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._finishing.wait(wait_s):
            if not self._suspended.is_set():
                self._update()
            wait_s = self._every_s
        self._update()

    def _update(self) -> None:
        if self._comment.refused:
            return
        try:
            self._comment.update(self._format_text())
        except Exception as e:  # top level of the thread: a comment must not end the run
            print(f"clustertrain batch: the job's comment: {type(e).__name__}: {e}", file=sys.stderr, flush=True)


def build_comment(run: RunDir) -> str:
    """Return the comment for the current state of a run."""
    # Not at the top: it imports numpy, and most batch processes never comment.
    from clustertrain.telemetry.analysis.summarize import summarize

    return format_comment(collect_metrics(run, summarize(run)))


def collect_metrics(run: RunDir, summary: Summary) -> CommentMetrics:
    row: dict[str, Any] = metrics.find_latest_row(run) or {}
    used = [(g.memory_used_gib.max, g.memory_total_gib) for g in summary.gpus if g.memory_used_gib is not None]
    peak_gib, total_gib = max(used, key=lambda pair: pair[0], default=(None, None))
    return CommentMetrics(
        run=run.id,
        step=None if row.get("step") is None else int(row["step"]),
        total_steps=total_steps(run),
        gpu_utilization=_mean(g.utilization for g in summary.gpus),
        memory_used_gib=peak_gib,
        memory_total_gib=total_gib,
        power_w=_mean(g.power_w for g in summary.gpus),
        goodput=None if summary.goodput is None else summary.goodput.ratio,
        insights=sum(insight.severity != "info" for insight in summary.insights),
    )


def _mean(values: Iterable[Stats | None]) -> float | None:
    means = [stats.mean for stats in values if stats is not None]
    return sum(means) / len(means) if means else None

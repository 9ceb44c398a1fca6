"""The child process of :mod:`clustertrain.ui.details`: ``python -m clustertrain.ui.details_child``.

The request is JSON on standard input. Each answer is a line of JSON that is added to the file that the request names.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from clustertrain import schema
from clustertrain.printable import printable
from clustertrain.report.gpu_table import busy_stats, mean_known, stat_mean
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.analysis.summarize import SummaryRequest, summarize
from clustertrain.telemetry.report_schema import GpuSummary, Insight
from clustertrain.ui.details import Answer, Request
from clustertrain.ui.rows import Details

SPARK_STEPS = 32


def main() -> None:
    os.nice(10)  # the pages and the user's own programs come first
    request = schema.decode(sys.stdin.buffer.read(), Request)
    with Path(request.out).open("ab", buffering=0) as out:
        for index, (path, state) in enumerate(request.runs):
            details = compute_details(RunDir(Path(os.fsdecode(path))), state)
            out.write(msgspec.json.encode(Answer(index, details)) + b"\n")


def compute_details(run: RunDir, state: str | None) -> Details:
    """Return the details of a run. ``state`` is that of its status."""
    try:
        summary = summarize(run, SummaryRequest(state=state))
    except Exception as e:  # damaged files may raise anything
        return Details(error=printable(f"{type(e).__name__}: {e}"))
    return Details(
        utilization=mean_known([stat_mean(busy_stats(g)) for g in summary.gpus]),
        spark=_build_spark(summary.gpus),
        critical=_count(summary.insights, "critical"),
        warning=_count(summary.insights, "warning"),
        info=_count(summary.insights, "info"),
        idle_gpu_hours=summary.waste.by_cause.get("idle_gpus", 0.0) if summary.waste is not None else 0.0,
    )


def _count(insights: Sequence[Insight], severity: str) -> int:
    return sum(insight.severity == severity for insight in insights)


def _build_spark(gpus: Sequence[GpuSummary]) -> list[float | None]:
    """Return the mean over the GPUs in at most ``SPARK_STEPS`` equal steps."""
    timelines = [g.timeline.utilization for g in gpus if g.timeline.utilization]
    if not timelines:
        return []
    count = max(map(len, timelines))
    steps = min(SPARK_STEPS, count)
    bounds = [round(i * count / steps) for i in range(steps + 1)]
    means = [
        mean_known([value for line in timelines for value in line[first:last]])
        for first, last in itertools.pairwise(bounds)
    ]
    return [None if mean is None else round(mean, 3) for mean in means]


if __name__ == "__main__":
    main()

"""The telemetry of a run for its page: the same parts as the one-file report has."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain import clock
from clustertrain.report.html import charts, gpu_cells, notes, page
from clustertrain.report.html.pack import Packer
from clustertrain.report.html.text import clean
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.report_schema import Summary


def describe(summary: Summary, curves: Curves) -> dict[str, Any]:
    """Return the insights, the table of GPUs, and what the charts draw, whose values are packed in ``blob``.

    ``t`` (UTC epoch s) says when the summary was made.
    """
    packer = Packer()
    marks, _ = charts.lane_events(summary)
    document = {
        "t": clock.now(),
        "data": page.page_data(summary, curves, marks, packer),
        "insights": msgspec.to_builtins(notes.build_notes(summary)),
        "gpu_table": msgspec.to_builtins(gpu_cells.build_table(summary)),
        "source": curves.source,
        "choice": curves.choice,
        "read_errors": summary.read_errors,
        "enabled": summary.enabled,
    }
    return {**clean(document), "blob": packer.encode()}

"""The telemetry of a run for its page."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain.report.html import charts, page
from clustertrain.report.html.pack import Packer
from clustertrain.report.html.text import clean
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.report_schema import Summary


def describe(summary: Summary, curves: Curves) -> dict[str, Any]:
    packer = Packer()
    marks, _ = charts.lane_events(summary)
    data = page.page_data(summary, curves, marks, packer)
    document = {
        "data": data,
        "insights": [msgspec.to_builtins(i) for i in summary.insights],
        "read_errors": summary.read_errors,
        "source": curves.source,
        "choice": curves.choice,
    }
    return {**clean(document), "blob": packer.encode()}

"""Rules that turn a summary into insights with advice. A missing value silences only its rule.

Rules run on their own, except that a GPU gets one insight from ``gpus``, and low utilization one cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.run import events
from clustertrain.telemetry.findings import SEVERITY_ORDER
from clustertrain.telemetry.insights import cost, errors, gpus, host, memory, price, recording, utilization
from clustertrain.telemetry.insights.context import JobContext
from clustertrain.telemetry.report_schema import Insight, Summary

_RULES: tuple[Callable[[JobContext], Iterable[Insight]], ...] = (
    *errors.RULES,
    gpus.gpu_outliers,
    utilization.low_utilization,
    *memory.RULES,
    *cost.RULES,
    *host.RULES,
    *recording.RULES,
)


def build_insights(summary: Summary, log: Iterable[events.Event]) -> list[Insight]:
    """Return all insights, the most severe first, then by code, node and rank."""
    job = JobContext(summary, log)
    insights = price.add_costs(job, [insight for rule in _RULES for insight in rule(job)])
    return sorted(
        insights, key=lambda n: (SEVERITY_ORDER[n.severity], n.code, n.node or "", -1 if n.rank is None else n.rank)
    )

"""Rules that turn a summary into insights with advice. A missing value silences only its rule.

Rules run on their own, except that a GPU gets one insight from ``gpus``, and low utilization one cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.run import events
from clustertrain.telemetry.findings import CRITICAL, SEVERITY_ORDER
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
    """Return all insights: the most severe first, then the most expensive, then by code, node and rank."""
    job = JobContext(summary, log)
    return sorted(price.add_costs(job, [insight for rule in _RULES for insight in rule(job)]), key=_order)


def _order(insight: Insight) -> tuple[int, float, str, str, int]:
    # A critical finding without a price, such as a lost GPU, comes before those that only cost time.
    unknown = float("inf") if insight.severity == CRITICAL else 0.0
    hours = unknown if insight.gpu_hours is None else insight.gpu_hours
    rank = -1 if insight.rank is None else insight.rank
    return SEVERITY_ORDER[insight.severity], -hours, insight.code, insight.node or "", rank

"""Render insights with a sign for their severity and their fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clustertrain.plan.layout import format_number, pluralize
from clustertrain.report.gpu_table import shorten_uuid
from clustertrain.telemetry.insights.price import WAITED_FOR
from clustertrain.telemetry.report_schema import Insight

SEVERITY_SIGNS = {"critical": ("!!", "bold red"), "warning": ("! ", "bold yellow"), "info": ("i ", "bold cyan")}
_MAX_PER_KIND = 3  # insights of one kind that are shown; the others are counted
_PADDING = (0, 0, 0, 3)


def verdict(insights: Sequence[Insight], *, has_failed: bool = False) -> Text:
    """Return how many insights need attention, and the worst of them, in one line.

    ``has_failed``: the run failed, which its telemetry may not explain.
    """
    counts = {severity: sum(i.severity == severity for i in insights) for severity in ("critical", "warning")}
    parts = [f"{counts['critical']} critical"] if counts["critical"] else []
    parts += [pluralize(counts["warning"], "warning")] if counts["warning"] else []
    if not parts and is_unrecorded(insights):
        return Text("Nothing was recorded", style="bold yellow")
    if not parts and has_failed:
        return Text("The run failed; the telemetry shows no problem", style="bold yellow")
    if not parts:
        return Text("No problem found", style="bold green")
    worst = next(i for i in insights if i.severity == ("critical" if counts["critical"] else "warning"))
    style = SEVERITY_SIGNS[worst.severity][1]
    # Only the counts in color: a sentence in red is hard to read on a dark background.
    text = (f": {worst.text}{format_target(worst)}", "bold")
    return Text.assemble((", ".join(parts), style), text, overflow="fold")


def is_unrecorded(insights: Sequence[Insight]) -> bool:
    """Return whether nothing, or nothing of some attempts, was recorded."""
    return any(i.code == "no_telemetry" for i in insights)


def render(insights: Sequence[Insight], show_all: bool = False) -> list[RenderableType]:
    """Render insights grouped by kind; beyond ``_MAX_PER_KIND`` of a kind only a count is shown."""
    groups: dict[tuple[str, str], list[Insight]] = {}
    for insight in insights:
        groups.setdefault((insight.severity, insight.code), []).append(insight)
    parts: list[RenderableType] = [Text("Insights", style="bold")]
    for group in groups.values():
        visible = group if show_all else group[:_MAX_PER_KIND]
        parts += [render_insight(insight) for insight in visible]
        if len(group) > len(visible):
            remainder = f"and {len(group) - len(visible):,} more like these (--all shows them, --json has them)"
            parts.append(Padding(remainder, _PADDING))
        fixes = list(dict.fromkeys(n.fix for n in visible if n.fix))
        parts += [Padding(Text(f"{advice_label(group[0])}: {fix}"), _PADDING) for fix in fixes]
    return parts


def render_insight(insight: Insight) -> RenderableType:
    sign, style = SEVERITY_SIGNS[insight.severity]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=2)
    grid.add_column(overflow="fold")
    cost = format_cost(insight)
    grid.add_row(Text(sign, style=style), Text(insight.text + format_target(insight) + (f" ({cost})" if cost else "")))
    return grid


def advice_label(insight: Insight) -> str:
    """Return what the advice of an insight is: a remark on a run without a problem has no fix."""
    return "tip" if insight.severity == "info" else "fix"


def format_cost(insight: Insight) -> str:
    """Return what the finding cost, such as ``cost about 22.9 GPU-hours``; empty if unknown, or if the text says it."""
    if insight.gpu_hours is None or insight.code == "gpu_hours_wasted":
        return ""
    hours = f"about {format_number(insight.gpu_hours)} GPU-hours"
    return f"{hours} if all GPUs waited for it" if insight.code in WAITED_FOR else f"cost {hours}"


def format_target(insight: Insight) -> str:
    """Return the insight's rank and GPU as `` [rank 3, GPU-5b1c9f0e]``, without those that its text mentions."""
    target = unmentioned_ids(insight, shorten_uuid)
    return f" [{', '.join(target)}]" if target else ""


def unmentioned_ids(insight: Insight, format_uuid: Callable[[str], str] = str) -> list[str]:
    """Return the rank and the UUID (through ``format_uuid``) of the insight, without those that its text mentions."""
    ids = []
    if insight.rank is not None and not re.search(rf"\brank {insight.rank}\b", insight.text, re.IGNORECASE):
        ids.append(f"rank {insight.rank}")
    if insight.uuid is not None and insight.uuid not in insight.text:
        ids.append(format_uuid(insight.uuid))
    return ids

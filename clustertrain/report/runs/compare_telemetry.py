"""Text of the telemetry of two runs, in ``clustertrain compare``."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.report import insights, status, terminal
from clustertrain.report.terminal import Glyphs
from clustertrain.telemetry.analysis.compare import METRIC_RULES, MetricComparison, Side, TelemetryComparison
from clustertrain.telemetry.report_schema import Insight

WIDE_COLUMNS = 76
_SIDE_LABELS = {"a": "A", "b": "B", "a and b": "A and B"}
EQUAL_TOLERANCE = 0.02  # ratios closer to 1 are neither better nor worse
EQUAL_SHARES = 0.01  # nor are shares of lost time that differ by less of the whole


def render(comparison: TelemetryComparison, width: int, signs: Glyphs = terminal.UNICODE) -> list[list[RenderableType]]:
    """Return blocks of text; below ``WIDE_COLUMNS`` columns without differences, which the ratios show too."""
    return [
        [_sides(comparison, signs)],
        _figures(comparison.figures, width, signs),
        _goodput(comparison.goodput, width, signs),
        _insights("Insights only for A", comparison.only_a),
        _insights("Insights only for B", comparison.only_b),
    ]


def _sides(comparison: TelemetryComparison, signs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        table.add_row(Text(name, style="bold"), _describe_side(side, signs))
    if warning := _size_warning(comparison):
        table.add_row("", warning)
    return table


def _size_warning(comparison: TelemetryComparison) -> str:
    """Return which metrics of runs with different sizes are comparable, or an empty string for equal sizes."""
    steps = comparison.figures["steps"]
    parts = [f"{comparison.a.gpus:,} and {comparison.b.gpus:,} GPUs"] if comparison.a.gpus != comparison.b.gpus else []
    parts += [f"{steps.a:,.0f} and {steps.b:,.0f} steps"] if steps.difference and steps.a is not None else []
    if not parts:
        return ""
    return (
        f"{', '.join(parts)}: steps, GPU-hours and energy per GPU are totals of the run and not scaled; "
        "compare tokens/s per GPU, energy per token and shares instead"
    )


def _describe_side(side: Side, signs: Glyphs) -> Text:
    gpus = f"{_pluralize(side.gpus, 'GPU')}" if side.gpus else "no GPU metrics"
    where = f"{_pluralize(side.nodes, 'node')}, {gpus}" + (f" ({', '.join(side.gpu_names)})" if side.gpu_names else "")
    parts = [where, _pluralize(side.attempts, "attempt"), *([f"job {side.job_id}"] if side.job_id else [])]
    return Text(signs.dot.join(parts))


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _figures(figures: Mapping[str, MetricComparison], width: int, signs: Glyphs) -> list[RenderableType]:
    """Return a table of the metrics that at least one run has, and the reasons for missing ones."""
    table = _table("", width)
    titles_by_reason: dict[str, list[str]] = {}
    for name, figure in figures.items():
        reasons = figure.missing
        if len(set(reasons.values())) < len(reasons):
            reasons = {"a and b": reasons["a"]}
        for side, reason in reasons.items():
            titles_by_reason.setdefault(f"{_SIDE_LABELS[side]}: {reason}", []).append(METRIC_RULES[name].title)
        if figure.a is not None or figure.b is not None:
            _add_row(table, METRIC_RULES[name].title, figure, signs)
    lines = [Text(f"{signs.dash} {why} ({', '.join(names)})") for why, names in titles_by_reason.items()]
    return [table, *lines] if table.row_count else list(lines)


def _table(title: str, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    for name in ("A", "B", *(["B - A"] if width >= WIDE_COLUMNS else []), "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _add_row(table: Table, title: str, figure: MetricComparison, signs: Glyphs) -> None:
    largest = max((abs(v) for v in (figure.a, figure.b) if v is not None), default=0.0)
    values = [signs.dash if v is None else _format_value(v, figure.unit, largest) for v in (figure.a, figure.b)]
    change = signs.dash if figure.difference is None else _format_difference(figure.difference, figure.unit, largest)
    ratio = signs.dash if figure.ratio is None else f"{figure.ratio:.3f}"
    changes = [change, ratio] if len(table.columns) == 6 else [ratio]
    table.add_row(title, *values, *changes, _verdict(figure))


def _verdict(figure: MetricComparison) -> Text:
    if figure.better is None or figure.ratio is None or abs(figure.ratio - 1) < EQUAL_TOLERANCE:
        return Text()
    if figure.unit == "ratio" and figure.better == "lower" and abs(figure.difference or 0.0) < EQUAL_SHARES:
        return Text()
    better = (figure.ratio > 1) == (figure.better == "higher")
    return Text("better", style="green") if better else Text("worse", style="red")


_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms")),
    "J": ((3.6e6, "kWh"), (3600.0, "Wh"), (1.0, "J"), (1e-3, "mJ")),
}
_INTEGER_UNITS = ("tokens/s", "steps", "W", "MHz")
_UNITS_IN_TITLE = ("tokens/s", "steps")  # units that the row's title already states


def _format_value(value: float, unit: str, largest: float) -> str:
    """Format ``value`` with the scale and decimals of the row's ``largest`` value, so that A, B and B - A match."""
    if unit == "ratio":
        return f"{value:.1%}"
    if not unit:
        return f"{value:,.4g}"
    unit_size, unit_text = 1.0, "" if unit in _UNITS_IN_TITLE else unit
    if unit in _SCALES:
        unit_size, unit_text = next((s for s in _SCALES[unit] if largest >= s[0]), _SCALES[unit][-1])
    value, largest = value / unit_size, largest / unit_size
    decimals = 0 if unit in _INTEGER_UNITS or largest >= 100 else 1 if largest >= 10 else 2
    text = f"{value:,.{decimals}f}"
    if value and not float(text.replace(",", "")) and unit not in _INTEGER_UNITS:
        text = f"{value:.2g}"
    return f"{text} {unit_text}".rstrip()


def _format_difference(difference: float, unit: str, largest: float) -> str:
    if not difference:
        return "0"
    if unit == "ratio":
        return f"{100 * difference:+.1f} pts"
    return ("+" if difference > 0 else "-") + _format_value(abs(difference), unit, largest)


def _goodput(figures: Mapping[str, MetricComparison], width: int, signs: Glyphs) -> list[RenderableType]:
    table = _table("Where the time went", width)
    for component, figure in figures.items():
        if figure.a or figure.b:
            _add_row(table, status.GOODPUT_LABELS[component], figure, signs)
    return [table] if table.row_count else []


def _insights(title: str, found: list[Insight]) -> list[RenderableType]:
    return [Text(title, style="bold"), *insights.render(found)[1:]] if found else []

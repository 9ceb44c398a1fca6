"""The table of GPUs and ranks of ``clustertrain top``: columns that fit, sorting, filter.

Each line is built separately and never wrapped: a rich table would take ten times as long, every second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.text import Text

from clustertrain.durations import format_duration, format_step_time
from clustertrain.report import terminal
from clustertrain.report.terminal import Glyphs, format_percent, format_used, meter
from clustertrain.report.top import problems
from clustertrain.report.top.problems import Problem
from clustertrain.report.top.view import GpuRow, NodeView, RunView

WIDE_COLUMNS = 120
SORTS = ("problems", "node", "utilization", "memory", "power", "temperature", "step")
_NODE_WIDTH = 14
_NODE_COLUMNS = ("Node", "CPU", "Host GiB", "Age")

Column = tuple[str, int, Callable[[GpuRow], "str | Text"], bool]
RowKey = tuple[str, str | None, int | None]


def row_key(row: GpuRow) -> RowKey:
    """Return what identifies a row over several frames."""
    return row.node, row.uuid, row.rank


def title_row(columns: Sequence[Column]) -> Text:
    return Text(" ".join(_align(title, width, left_aligned) for title, width, _, left_aligned in columns), style="bold")


def render_rows(rows: Sequence[GpuRow], columns: Sequence[Column], selected: int | None = None) -> list[Text]:
    """Return one line per row; node columns are filled only in a node's first line."""
    rendered: list[Text] = []
    previous_node = None
    for i, row in enumerate(rows):
        cells = []
        for title, width, render, left_aligned in columns:
            is_repeated = row.node == previous_node and title in _NODE_COLUMNS
            cells.append(_pad("" if is_repeated else render(row), width, left_aligned))
        line = Text(" ").join(cells)
        if i == selected:
            line.stylize("bold reverse")
        rendered.append(line)
        previous_node = row.node
    return rendered


def _align(text: str, width: int, left_aligned: bool) -> str:
    return text[:width].ljust(width) if left_aligned else text[:width].rjust(width)


def _pad(value: str | Text, width: int, left_aligned: bool) -> Text:
    if isinstance(value, str):
        return Text(_align(value, width, left_aligned))
    padding = " " * max(0, width - value.cell_len)
    return value + Text(padding) if left_aligned else Text(padding) + value


def build_columns(view: RunView, width: int, signs: Glyphs) -> list[Column]:
    """Return (title, width, cell, left-aligned) of each column."""
    is_wide = width >= WIDE_COLUMNS
    nodes = {n.node: n for n in view.nodes}
    node_width = min(max((len(r.node) for r in view.rows), default=4), 24 if is_wide else _NODE_WIDTH)
    has_gpus = any(r.uuid for r in view.rows)
    bar_width = 6 if not is_wide else 16 if width >= 140 else 10
    columns: list[Column] = [
        ("Node", max(4, node_width), lambda r: _shorten_node(r.node, max(4, node_width), signs), True)
    ]
    if has_gpus:
        columns += [
            ("GPU", 3, lambda r: _format_int(r.gpu, signs), False),
            ("Util", bar_width + 5, lambda r: _utilization_bar(r, bar_width, signs), True),
            ("GiB", 7, lambda r: _memory_cell(r, signs), False),
            ("W", 4, lambda r: _format_float(r.power_w, signs), False),
            (signs.degree, 3, lambda r: _temperature_cell(r, signs), False),
            ("MHz", 4, lambda r: _format_float(r.sm_clock_mhz, signs), False),
            ("Held", 4, lambda r: _throttle_cell(r, signs), True),
        ]
    if is_wide and any(r.sm_activity is not None for r in view.rows):
        columns.append(("SM", 4, lambda r: format_percent(r.sm_activity, signs), False))
        columns.append(("Tens", 4, lambda r: format_percent(r.tensor_activity, signs), False))
    columns += [
        ("Rank", 4, lambda r: _format_int(r.rank, signs), False),
        ("Phase", 10, lambda r: r.phase or signs.dash, True),
        ("Step", 9 if is_wide else 7, lambda r: _step_cell(r, signs), False),
    ]
    if is_wide or not has_gpus:
        columns.append(("s/step", 8, lambda r: signs.dash if r.step_s is None else format_step_time(r.step_s), False))
        columns.append(("Wait", 4, lambda r: format_percent(r.data_wait_share, signs), False))
        columns.append(("CPU", 4, lambda r: format_percent(_find_node(nodes, r).cpu, signs), False))
    if is_wide:
        columns.append(("Host GiB", 9, lambda r: _host_memory_cell(_find_node(nodes, r), signs), False))
        columns.append(("Age", 5, lambda r: _age_cell(_find_node(nodes, r), signs), False))
    return columns


# Columns in the order in which a narrow terminal drops them; "bar" is the utilization bar. Others always stay.
_DROP_ORDER = ("Age", "Host GiB", "CPU", "Wait", "s/step", "Tens", "SM", "MHz", "°C", "C", "Held", "W", "bar", "GiB",
            "Rank", "Phase")  # fmt: skip


def fit_columns(columns: Sequence[Column], width: int) -> tuple[list[Column], list[str]]:
    """Return the columns that fit and the titles of the dropped ones."""
    fitting, dropped = list(columns), []
    for title in _DROP_ORDER:
        if sum(cells + 1 for _, cells, _, _ in fitting) - 1 <= width:
            break
        if title == "bar":
            fitting = [("Util", 5, _utilization_cell, False) if c[0] == "Util" else c for c in fitting]
        elif any(c[0] == title for c in fitting):
            fitting = [c for c in fitting if c[0] != title]
            dropped.append(title)
    return fitting, dropped


def _find_node(nodes: dict[str, NodeView], row: GpuRow) -> NodeView:
    return nodes.get(row.node) or NodeView(node=row.node)


def _shorten_node(node: str, width: int, signs: Glyphs) -> str:
    """Return the name without its domain if it is too long, else its end, which differs between nodes."""
    if len(node) > width:
        node = node.partition(".")[0]
    return node if len(node) <= width else ".." + node[-(width - 2) :]


def _format_int(value: int | None, signs: Glyphs) -> str:
    return signs.dash if value is None else str(value)


def _format_float(value: float | None, signs: Glyphs) -> str:
    return signs.dash if value is None else f"{value:.0f}"


def _utilization_bar(row: GpuRow, width: int, signs: Glyphs) -> Text:
    if row.utilization is None:
        return Text((row.reason or signs.dash).partition(":")[0][: width + 5])  # the problem lines show it in full
    style = terminal.utilization_style(row.utilization)
    return meter(row.utilization, width, style, signs) + Text(f"{row.utilization:>5.0%}", style=style)


def _utilization_cell(row: GpuRow) -> Text:
    if row.utilization is None:
        return Text("none")  # the problem lines show the reason
    return Text(f"{row.utilization:.0%}", style=terminal.utilization_style(row.utilization))


def _memory_cell(row: GpuRow, signs: Glyphs) -> Text:
    used, total = row.memory_used_gib, row.memory_total_gib
    return Text(format_used(used, total, signs), style="bold yellow" if problems.is_full(row) else "")


def _temperature_cell(row: GpuRow, signs: Glyphs) -> Text:
    return Text(_format_float(row.temperature_c, signs), style="bold yellow" if problems.is_hot(row) else "")


def _throttle_cell(row: GpuRow, signs: Glyphs) -> Text:
    """Return the throttle causes: P for the power limit, which is common and harmless, T for heat, H for hardware."""
    letters = "".join({"power": "P", "thermal": "T", "hardware": "H"}[cause] for cause in row.throttled)
    return Text(letters or signs.dash, style="bold red" if set(letters) & {"T", "H"} else "")


def _step_cell(row: GpuRow, signs: Glyphs) -> Text:
    return Text(_format_int(row.step, signs), style="bold yellow" if problems.is_late(row) else "")


def _host_memory_cell(node: NodeView, signs: Glyphs) -> str:
    return format_used(node.memory_used_gib, node.memory_total_gib, signs)


def _age_cell(node: NodeView, signs: Glyphs) -> str:
    if node.ended:
        return "ended"
    return (
        signs.dash if node.age_s is None else format_duration(node.age_s).partition("m")[0] + "m" * (node.age_s >= 59.5)
    )


def sort_rows(rows: Sequence[GpuRow], column: str, found: Sequence[Problem] = ()) -> list[GpuRow]:
    """Sort the rows: those ``found`` to have problems first, or by node in the run's order, or by a metric.

    The highest value of a metric comes first, but the lowest step.
    """
    if column == "problems":
        places = {row_key(problem.row): i for i, problem in enumerate(found)}
        return sorted(rows, key=lambda row: places.get(row_key(row), len(places)))
    metrics: dict[str, Callable[[GpuRow], float | None]] = {
        "utilization": lambda r: r.utilization,
        "memory": lambda r: r.memory_used_gib,
        "power": lambda r: r.power_w,
        "temperature": lambda r: r.temperature_c,
        "step": lambda r: None if r.step is None else -r.step,
    }
    metric = metrics.get(column)
    if metric is None:
        return list(rows)
    keyed = [(metric(r), r) for r in rows]
    return [r for _, r in sorted(keyed, key=lambda p: float("inf") if p[0] is None else -p[0])]


def filter_rows(rows: Sequence[GpuRow], text: str, found: Sequence[Problem] = ()) -> list[GpuRow]:
    """Return the rows that match each term of ``text``.

    A number or ``rank 5`` is a rank and ``gpu 3`` a GPU's number. Any other term is a part, in any case, of the node's
    name, the UUID, the phase or the problems.
    """
    terms = _FILTER_TERM.findall(text)
    problem_texts = {row_key(problem.row): problem.text for problem in found}
    return [row for row in rows if all(_matches(row, problem_texts.get(row_key(row), ""), *term) for term in terms)]


_FILTER_TERM = re.compile(r"(?:(rank|gpu) ?)?\b(\d+)(?=\s|$)|(\S+)", re.IGNORECASE)


def _matches(row: GpuRow, problem_text: str, kind: str, number: str, text: str) -> bool:
    if number:
        return (row.gpu if kind.lower() == "gpu" else row.rank) == int(number)
    texts = (row.node, row.uuid or "", row.phase or "", problem_text)
    return any(text.lower() in candidate.lower() for candidate in texts)

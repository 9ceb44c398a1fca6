"""The screen of ``clustertrain top`` as lines that fit a terminal: header, rows of GPUs and ranks, events.

Each line is built separately and never wrapped: a rich table would take ten times as long, every second.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence

import msgspec
from rich.text import Text

from clustertrain.durations import format_duration, format_step_time
from clustertrain.report import terminal
from clustertrain.report.status import STATE_STYLES
from clustertrain.report.terminal import Glyphs, format_percent, format_used, meter
from clustertrain.report.top.state import EventView, GpuRow, NodeView, RunView

WIDE_COLUMNS = 120
SORTS = ("node", "utilization", "memory", "power", "temperature", "step")
MIN_ROWS, MAX_EVENTS = 3, 6
MAX_LINES = 4  # per event or problem
_NODE_WIDTH = 14
_NODE_COLUMNS = ("Node", "CPU", "Host GiB", "Age")


class ViewOptions(msgspec.Struct):
    """The user's choices."""

    sort: str = SORTS[0]
    scroll: int = 0
    """Rows above the visible ones."""


def render_frame(view: RunView, width: int, height: int | None, signs: Glyphs, options: ViewOptions) -> list[Text]:
    """Return the lines of the frame, without a limit if ``height`` is None; clamp ``options.scroll`` to the rows."""
    header, rows = _header(view, width, signs), _sort_rows(view.rows, options.sort)
    columns, dropped_titles = _fit_columns(_columns(view, width, signs), width)
    titles = [_title_row(columns)] if rows else [Text(_empty_text(view))]
    problems = [*_problem_lines(view, width), *_dropped_columns_text(dropped_titles if rows else [], width)]
    if height is None:
        frame = [*header, *problems, *titles, *_render_rows(rows, columns), *_event_lines(view.events, width)]
    else:
        footer = f"q quit  s sort: {options.sort}"
        free = height - len(header) - len(titles) - 1
        min_rows = min(len(rows), MIN_ROWS)
        problems = problems[: max(0, free - min_rows)]
        free -= len(problems)
        # Rows come first, but events get a quarter of the free lines.
        events = _event_lines(view.events, width, max(free - len(rows), free // 4))
        num_visible = max(0, free - len(events))
        options.scroll = max(0, min(options.scroll, len(rows) - num_visible))
        num_below = len(rows) - options.scroll - num_visible
        if options.scroll or num_below > 0:
            footer += f"  up/down scroll ({options.scroll} above, {max(0, num_below)} below)"
        visible = _render_rows(rows[options.scroll : options.scroll + num_visible], columns)
        padding = [Text()] * (num_visible - len(visible))
        frame = [*header, *problems, *titles, *visible, *events, *padding, Text(footer, style="bold")][-height:]
    return [_crop(line, width) for line in frame]


def _crop(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.overflow = "crop"
    if line.cell_len > width:
        line.truncate(width, overflow="crop")
    return line


def _header(view: RunView, width: int, signs: Glyphs) -> list[Text]:
    state = view.state or "asking the scheduler"
    title = Text.assemble((view.run, "bold"), "  ", (state, STATE_STYLES.get(state, "red") if view.state else "cyan"))
    details = [
        f"job {view.job_id} ({view.backend})" if view.job_id else "",
        f"attempt {view.attempt}" if view.attempt else "",
    ]
    details.append(time.strftime("%H:%M:%S", time.localtime(view.t)))
    title.append("  " + signs.dot.join(details))
    header = [title]
    status_text = _status_text(view)
    if status_text:
        header.append(Text(status_text, style="yellow"))
    if view.step is not None:
        header.append(_progress(view, width, signs))
    header += _join_parts(_progress_parts(view), width, signs)
    if view.scheduler_error:
        header.append(Text(f"the scheduler did not answer: {view.scheduler_error.splitlines()[0]}", style="red"))
    return header


def _status_text(view: RunView) -> str:
    if view.state == "pending" or view.pending_reason or view.start_estimate:
        start_text = (
            f", expected to start {terminal.format_timestamp(view.start_estimate)}" if view.start_estimate else ""
        )
        return f"waiting for {view.pending_reason or 'the scheduler'}{start_text}"
    if view.state in ("completed", "failed", "cancelled"):
        return f"the run has ended ({view.ending or view.state}); this is its last state"
    if view.state == "requeued":
        return "between two attempts; this is the last state of the previous one"
    if not view.telemetry:
        return "telemetry is off in the recipe ([telemetry] enabled = false)"
    return ""


def _progress(view: RunView, width: int, signs: Glyphs) -> Text:
    if not view.total_steps:
        return Text(f"step {view.step}")
    fraction = min(1.0, (view.step or 0) / view.total_steps)
    prefix = f"step {view.step}/{view.total_steps} "
    suffix = f" {fraction:.0%}" + (f"  {_format_eta(view)}" if view.eta_s is not None else "")
    return (
        Text(prefix)
        + meter(fraction, max(8, min(40, width - len(prefix) - len(suffix))), "green", signs)
        + Text(suffix)
    )


def _format_eta(view: RunView) -> str:
    """Return the remaining time and whether it includes checkpoints and evaluations, without which it is too short."""
    overhead_text = "saves, evals not counted" if view.overhead is None else f"{view.overhead:.0%} for saves, evals"
    return f"about {format_duration(view.eta_s or 0.0)} left ({overhead_text})"


def _join_parts(parts: Sequence[str], width: int, signs: Glyphs) -> list[Text]:
    """Join the parts into as few lines as possible."""
    joined: list[str] = []
    for part in parts:
        if joined and len(joined[-1]) + len(signs.dot) + len(part) <= width:
            joined[-1] += signs.dot + part
        else:
            joined.append(part)
    return [Text(line) for line in joined]


def _progress_parts(view: RunView) -> list[str]:
    parts = []
    if view.step_s is not None:
        parts.append(f"{format_step_time(view.step_s)} per step")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    if view.goodput is not None and view.wall_s:
        parts.append(f"goodput {view.goodput:.0%} of {format_duration(view.wall_s)}")
    if view.since_step_s is not None and view.since_step_s > max(30.0, 10 * (view.step_s or 0.0)):
        parts.append(f"no step for {format_duration(view.since_step_s)}")
    if view.allocation_end is not None:
        left_s = view.allocation_end - view.t
        limit_text = " (before the run ends)" if view.eta_s is not None and 0 < left_s < view.eta_s else ""
        if left_s > 0:
            parts.append(f"time limit in {format_duration(left_s)}{limit_text}")
    return parts


def _problem_lines(view: RunView, width: int) -> list[Text]:
    """Return the problems of nodes and the reasons for missing GPU metrics, one line per distinct message."""
    nodes_by_problem: dict[str, list[str]] = {}
    for node in view.nodes:
        if node.problem:
            nodes_by_problem.setdefault(node.problem, []).append(node.node)
    gpus_by_reason: dict[str, list[str]] = {}
    for row in view.rows:
        if row.uuid and row.utilization is None and row.reason and row.reason not in nodes_by_problem:
            gpus_by_reason.setdefault(row.reason, []).append(
                f"GPU {row.uuid if row.gpu is None else row.gpu} of {row.node}"
            )
    messages = [f"! {_format_names(nodes, 'nodes')}: {problem}" for problem, nodes in nodes_by_problem.items()]
    messages += [f"! {_format_names(names, 'GPUs')}: {reason}" for reason, names in gpus_by_reason.items()]
    return [Text(line, style="yellow") for text in messages for line in _wrap(text, width, 2)]


def _dropped_columns_text(titles: Sequence[str], width: int) -> list[Text]:
    if not titles:
        return []
    return [Text(line) for line in _wrap(f"no room for {', '.join(titles)}: widen the terminal", width, 2)]


def _wrap(text: str, width: int, indent: int, max_lines: int = MAX_LINES) -> list[str]:
    """Wrap at spaces and indent the continuation lines; text beyond ``max_lines`` is cut and marked with ``..``."""
    lines = textwrap.wrap(text, max(width, indent + 8), subsequent_indent=" " * indent)
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], lines[max_lines - 1][: width - 3].rstrip() + " .."]
    return lines


def _format_names(names: Sequence[str], noun: str) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more {noun}"


_Column = tuple[str, int, Callable[[GpuRow], "str | Text"], bool]


def _empty_text(view: RunView) -> str:
    if view.attempt is None:
        return "no attempt has started yet"
    return "nothing has been recorded yet" if view.telemetry else "no metrics: telemetry is off"


def _title_row(columns: Sequence[_Column]) -> Text:
    return Text(" ".join(_align(title, width, left_aligned) for title, width, _, left_aligned in columns), style="bold")


def _render_rows(rows: Sequence[GpuRow], columns: Sequence[_Column]) -> list[Text]:
    """Return one line per row; node columns are filled only in a node's first line."""
    rendered, previous_node = [], None
    for row in rows:
        cells = []
        for title, width, render, left_aligned in columns:
            is_repeated = row.node == previous_node and title in _NODE_COLUMNS
            cells.append(_pad("" if is_repeated else render(row), width, left_aligned))
        rendered.append(Text(" ").join(cells))
        previous_node = row.node
    return rendered


def _align(text: str, width: int, left_aligned: bool) -> str:
    return text[:width].ljust(width) if left_aligned else text[:width].rjust(width)


def _pad(value: str | Text, width: int, left_aligned: bool) -> Text:
    if isinstance(value, str):
        return Text(_align(value, width, left_aligned))
    padding = " " * max(0, width - value.cell_len)
    return value + Text(padding) if left_aligned else Text(padding) + value


def _columns(view: RunView, width: int, signs: Glyphs) -> list[_Column]:
    """Return (title, width, cell, left-aligned) of each column."""
    is_wide = width >= WIDE_COLUMNS
    nodes = {n.node: n for n in view.nodes}
    node_width = min(max((len(r.node) for r in view.rows), default=4), 24 if is_wide else _NODE_WIDTH)
    has_gpus = any(r.uuid for r in view.rows)
    bar_width = 6 if not is_wide else 16 if width >= 140 else 10
    columns: list[_Column] = [
        ("Node", max(4, node_width), lambda r: _shorten_node(r.node, max(4, node_width), signs), True)
    ]
    if has_gpus:
        columns += [
            ("GPU", 3, lambda r: _format_int(r.gpu, signs), False),
            ("Util", bar_width + 5, lambda r: _utilization_bar(r, bar_width, signs), True),
            ("GiB", 7, lambda r: _memory_cell(r, signs), False),
            ("W", 4, lambda r: _format_float(r.power_w, signs), False),
            (signs.degree, 3, lambda r: _format_float(r.temperature_c, signs), False),
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


def _fit_columns(columns: Sequence[_Column], width: int) -> tuple[list[_Column], list[str]]:
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
    is_full = used is not None and total and used >= 0.97 * total
    return Text(format_used(used, total, signs), style="bold yellow" if is_full else "")


def _throttle_cell(row: GpuRow, signs: Glyphs) -> Text:
    """Return the throttle causes: P for the power limit, which is common and harmless, T for heat, H for hardware."""
    letters = "".join({"power": "P", "thermal": "T", "hardware": "H"}[cause] for cause in row.throttled)
    return Text(letters or signs.dash, style="bold red" if set(letters) & {"T", "H"} else "")


def _step_cell(row: GpuRow, signs: Glyphs) -> Text:
    is_late = row.behind is not None and row.behind > 1
    return Text(_format_int(row.step, signs), style="bold yellow" if is_late else "")


def _host_memory_cell(node: NodeView, signs: Glyphs) -> str:
    return format_used(node.memory_used_gib, node.memory_total_gib, signs)


def _age_cell(node: NodeView, signs: Glyphs) -> str:
    if node.ended:
        return "ended"
    return (
        signs.dash if node.age_s is None else format_duration(node.age_s).partition("m")[0] + "m" * (node.age_s >= 59.5)
    )


def _sort_rows(rows: Sequence[GpuRow], column: str) -> list[GpuRow]:
    """Sort the rows: by node in the run's order, by a metric with the highest first, by step with the lowest first."""
    keys: dict[str, Callable[[GpuRow], float | None]] = {
        "utilization": lambda r: r.utilization,
        "memory": lambda r: r.memory_used_gib,
        "power": lambda r: r.power_w,
        "temperature": lambda r: r.temperature_c,
        "step": lambda r: None if r.step is None else -r.step,
    }
    key = keys.get(column)
    if key is None:
        return list(rows)
    keyed = [(key(r), r) for r in rows]
    return [r for _, r in sorted(keyed, key=lambda p: float("inf") if p[0] is None else -p[0])]


_SEVERITY = {"critical": "bold red", "warning": "bold yellow"}


def _event_lines(events: Sequence[EventView], width: int, max_lines: int | None = None) -> list[Text]:
    """Return the newest events in at most ``max_lines`` lines; alerts stay until they are cleared."""
    cleared_texts: set[str] = set()
    active_alerts = []
    for e in reversed(events):
        if e.event == "alert" and e.text.startswith("cleared: "):
            cleared_texts.add(e.text.removeprefix("cleared: "))
        elif e.event == "alert" and e.text.partition(": ")[2] not in cleared_texts:
            active_alerts.append(e)
    selected = [*active_alerts, *(e for e in reversed(events) if e not in active_alerts)][:MAX_EVENTS]
    blocks: list[tuple[float, list[Text]]] = []
    lines_left = MAX_EVENTS * MAX_LINES if max_lines is None else max_lines
    for e in selected:
        if lines_left > 0:
            blocks.append((e.t, _wrap_event(e, width, min(lines_left, MAX_LINES))))
            lines_left -= len(blocks[-1][1])
    return [line for _, lines in sorted(blocks, key=lambda k: k[0]) for line in lines]


def _wrap_event(event: EventView, width: int, max_lines: int) -> list[Text]:
    style = "" if event.text.startswith("cleared: ") else _SEVERITY.get(event.severity or "", "")
    timestamp = time.strftime("%H:%M:%S ", time.localtime(event.t))
    first, *continuation = _wrap(timestamp + " ".join(event.text.split()), width, len(timestamp), max_lines)
    return [
        Text.assemble(timestamp, (first[len(timestamp) :], style)),
        *(Text(line, style=style) for line in continuation),
    ]

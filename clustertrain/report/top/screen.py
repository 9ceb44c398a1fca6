"""The screen of ``clustertrain top`` as lines that fit a terminal: header, rows of GPUs and ranks, events.

Each line is built separately and never wrapped: a rich table would take ten times as long, every second.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

import msgspec
from rich.text import Text

from clustertrain.durations import format_duration, format_step_time
from clustertrain.report import terminal
from clustertrain.report.braille_plot import PlotLine, plot
from clustertrain.report.status import STATE_STYLES
from clustertrain.report.terminal import Glyphs, format_percent, meter
from clustertrain.report.top.history import BIN_S, History
from clustertrain.report.top.problems import Problem, find_problems, format_problems
from clustertrain.report.top.table import (
    SORTS,
    RowKey,
    build_columns,
    filter_rows,
    fit_columns,
    render_rows,
    row_key,
    sort_rows,
    title_row,
)
from clustertrain.report.top.view import EventView, GpuRow, RunView
from clustertrain.run import state
from clustertrain.telemetry.findings import CRITICAL, SEVERITY_ORDER, WARNING

MIN_ROWS, MAX_EVENTS = 3, 6
MAX_LINES = 4  # per event or problem
MIN_GOODPUT_S = 60.0  # the ledger is up to a minute older than the rest of the frame
MIN_SPARKLINE, MAX_SPARKLINE = 8, 60
MIN_PLOT_COLUMNS, MIN_PLOT_ROWS, MAX_PLOT_ROWS, MIN_PLOT_POINTS = 60, 6, 14, 3
NO_HISTORY = History()
_SEVERITY = {CRITICAL: "bold red", WARNING: "bold yellow"}
_SIGNS = {CRITICAL: "!!", WARNING: "!"}


class ViewOptions(msgspec.Struct):
    """The user's choices."""

    sort: str = SORTS[0]
    filter: str = ""
    """Only rows that match; see ``filter_rows``."""
    scroll: int = 0
    """Rows above the visible ones."""
    selected: int = 0
    """Index of the selected row among all that match."""
    selected_key: RowKey | None = None
    """What identifies the selected row."""
    follows_row: bool = False
    """The user has chosen a row, which stays selected when the sorting moves it; else the first row is selected."""
    typing: str | None = None
    """The filter while it is typed."""
    dialog: str | None = None
    """``help`` or ``details``, shown instead of the frame."""

    def move(self, rows: int) -> None:
        self.selected, self.selected_key, self.follows_row = max(0, self.selected + rows), None, True

    def go_to_top(self) -> None:
        self.selected, self.selected_key, self.scroll, self.follows_row = 0, None, 0, False

    def clamp(self, rows: Sequence[GpuRow], num_visible: int) -> None:
        """Keep the selection inside ``rows``, and scroll so that it is visible."""
        self.selected = max(0, min(self.selected, len(rows) - 1))
        keys = [row_key(row) for row in rows]
        if self.follows_row and self.selected_key in keys:
            self.selected = keys.index(self.selected_key)
        self.selected_key = keys[self.selected] if keys else None
        self.scroll = min(self.scroll, self.selected, max(0, len(rows) - num_visible))
        self.scroll = max(self.scroll, self.selected - max(1, num_visible) + 1)


def render_frame(
    view: RunView, width: int, height: int | None, signs: Glyphs, options: ViewOptions, history: History = NO_HISTORY
) -> list[Text]:
    """Return the lines of the frame, without a limit if ``height`` is None; clamp the selection to the rows."""
    # After its end, a run's GPUs idle.
    found = [] if view.state in state.FINAL else find_problems(view.rows)
    rows = sort_rows(filter_rows(view.rows, options.filter, found), options.sort, found)
    columns, dropped_titles = fit_columns(build_columns(view, width, signs), width)
    head = [*_header(view, width, signs), *_history_lines(view, history, width, signs)]
    titles = [title_row(columns)] if rows else [Text(_empty_text(view))]
    dropped = _dropped_columns_text(dropped_titles if rows else [], width)
    if height is None:
        problems = [*_problem_lines(view, found, width, signs), *dropped]
        frame = [*head, *problems, *titles, *render_rows(rows, columns), *_event_lines(view.events, width)]
        return [_crop(line, width) for line in frame]
    free = height - len(head) - len(titles) - 1
    min_rows = min(len(rows), MIN_ROWS)
    problems = _limit_problems(_problem_lines(view, found, width, signs), max(free // 2 - len(dropped), 1), width)
    problems = [*problems, *dropped][: max(0, free - min_rows)]
    free -= len(problems)
    # Rows come first, but events get a quarter of the free lines.
    events = _event_lines(view.events, width, max(free - len(rows), free // 4))
    num_visible = max(0, free - len(events))
    options.clamp(rows, num_visible)
    visible = rows[options.scroll : options.scroll + num_visible]
    filler = _plots(history, width, num_visible - len(visible), signs)
    footer = _footer(view, options, len(rows), num_visible, width)
    table = render_rows(visible, columns, options.selected - options.scroll)
    frame = [*head, *problems, *titles, *table, *filler, *events, footer][-height:]
    return [_crop(line, width) for line in frame]


def _limit_problems(lines: list[Text], max_lines: int, width: int) -> list[Text]:
    if len(lines) <= max_lines:
        return lines
    return [*lines[: max_lines - 1], Text("!  more problems: sort by problems to see their rows first")]


def _footer(view: RunView, options: ViewOptions, num_rows: int, num_visible: int, width: int) -> Text:
    """Return the line of keys; a narrow terminal shows the first ones, and all are in the help."""
    if options.typing is not None:
        return Text.assemble((f"/{options.typing}", "bold"), ("_", "blink"), "  Enter: filter, Esc: show all rows")
    parts = ["q quit", "? help", f"s sort: {options.sort}", "/ filter", "Enter details"]
    if options.filter:
        parts[3] = f"/ filter: {options.filter} ({num_rows} of {len(view.rows)})"
    num_below = num_rows - options.scroll - num_visible
    if options.scroll or num_below > 0:
        parts.insert(3, f"({options.scroll} above, {max(0, num_below)} below)")
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 2 + len(part) <= width:
            text += f"  {part}"
    return Text(text, style="bold")


def _crop(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.overflow = "crop"
    if line.cell_len > width:
        line.truncate(width, overflow="crop")
    return line


def _header(view: RunView, width: int, signs: Glyphs) -> list[Text]:
    shown = state.CANCELLING if view.cancelling else view.state or "asking the scheduler"
    title = Text.assemble((view.run, "bold"), "  ", (shown, STATE_STYLES.get(shown, "red") if view.state else "cyan"))
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
    if view.state == state.PENDING or view.pending_reason or view.start_estimate:
        start_text = (
            f", expected to start {terminal.format_timestamp(view.start_estimate)}" if view.start_estimate else ""
        )
        return f"waiting for {view.pending_reason or 'the scheduler'}{start_text}"
    if view.state in state.FINAL:
        return f"the run has ended ({view.ending or view.state}); this is its last state"
    if view.state == state.REQUEUED:
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
    if view.goodput is not None and view.wall_s is not None and view.wall_s >= MIN_GOODPUT_S:
        parts.append(f"goodput {view.goodput:.0%} of {format_duration(view.wall_s)}")
    if view.since_step_s is not None and view.since_step_s > max(30.0, 10 * (view.step_s or 0.0)):
        parts.append(f"no step for {format_duration(view.since_step_s)}")
    if view.allocation_end is not None:
        left_s = view.allocation_end - view.t
        limit_text = " (before the run ends)" if view.eta_s is not None and 0 < left_s < view.eta_s else ""
        if left_s > 0:
            parts.append(f"time limit in {format_duration(left_s)}{limit_text}")
    return parts


def _history_lines(view: RunView, history: History, width: int, signs: Glyphs) -> list[Text]:
    """Return utilization and loss as sparklines, with their last values and the age of the samples below."""
    ages = [n.age_s for n in view.nodes if n.age_s is not None and not n.ended]
    age = f", {format_duration(max(ages))} ago" if ages else ""
    noun = "CPUs" if history.is_cpu else "GPUs"
    curves: list[tuple[str, Sequence[float | None], str]] = []
    if history.busy:
        last = next((v for v in reversed(history.busy) if v is not None), None)
        curves.append((noun, history.busy, f"{format_percent(last, signs)} busy{age}"))
    losses = [loss for _, loss in history.losses]
    if len(losses) > 1:
        curves.append(("loss", _to_ratios(losses), f"{losses[-1]:.4g}"))
    if not curves:
        return []
    texts = sum(len(name) + len(value) + 2 for name, _, value in curves) + 3 * (len(curves) - 1)
    cells = min(MAX_SPARKLINE, (width - texts) // len(curves))
    if cells < MIN_SPARKLINE:
        return []
    line = Text()
    for name, values, value in curves:
        line.append("   " if line else "")
        line.append(f"{name} ").append(terminal.sparkline(values, cells, signs), "cyan").append(f" {value}")
    return [line]


def _to_ratios(losses: Sequence[float]) -> list[float | None]:
    """Scale the losses from lowest to highest; a few first steps may be far above all others."""
    low, high = min(losses), max(losses)
    return [(loss - low) / ((high - low) or 1.0) for loss in losses]


def _plots(history: History, width: int, rows: int, signs: Glyphs) -> list[Text]:
    """Return plots of utilization and loss side by side that fill ``rows`` lines, or empty lines."""
    height = min(rows - 1, MAX_PLOT_ROWS)
    noun = "CPUs" if history.is_cpu else "GPUs"
    busy = [(i, v) for i, v in enumerate(history.busy, 1 - len(history.busy)) if v is not None]
    percents = PlotLine("*", [round(i * BIN_S / 60, 1) for i, _ in busy], [100 * v for _, v in busy])
    losses = PlotLine("*", [step for step, _ in history.losses], [loss for _, loss in history.losses])
    plots = [(percents, "minutes", f"{noun} busy, %", (0.0, 100.0)), (losses, "steps", "loss", None)]
    plots = [p for p in plots if len(p[0].y) >= MIN_PLOT_POINTS]
    if height < MIN_PLOT_ROWS or not plots or width < MIN_PLOT_COLUMNS:
        return [Text()] * max(0, rows)
    plot_width = (width - 2 * (len(plots) - 1)) // len(plots)
    drawn = [
        plot([line], plot_width, height, signs, colours=signs.bar == "█", x_label=x, y_label=y, y_limits=limits)
        for line, x, y, limits in plots
    ]
    joined = []
    for parts in zip(*drawn, strict=True):
        line = Text()
        for part in parts:
            line.append_text(part)
            line.append(" " * max(0, plot_width + 2 - part.cell_len))
        joined.append(line)
    return [Text(), *joined, *[Text()] * (rows - 1 - len(joined))]


def _problem_lines(view: RunView, found: Sequence[Problem], width: int, signs: Glyphs) -> list[Text]:
    """Return what is wrong, the worst first: GPUs and ranks that differ from the others, then whole nodes."""
    nodes_by_problem: dict[str, list[str]] = {}
    for node in view.nodes:
        if node.problem:
            nodes_by_problem.setdefault(node.problem, []).append(node.node)
    messages = format_problems([p for p in found if p.row.reason not in nodes_by_problem])
    messages += [(WARNING, f"{_format_names(nodes)}: {problem}") for problem, nodes in nodes_by_problem.items()]
    messages.sort(key=lambda m: SEVERITY_ORDER[m[0]])
    lines = []
    for severity, text in messages:
        sign = _SIGNS[severity]
        for line in _wrap(f"{sign} {text}".replace("°C", signs.degree), width, 3):
            lines.append(Text(line, style="bold" if severity == CRITICAL else ""))
            if line.startswith(sign):
                lines[-1].stylize(_SEVERITY[severity], 0, len(sign))
    return lines


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


def _format_names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) < 4 else f"{nodes[0]} and {len(nodes) - 1} more nodes"


def _empty_text(view: RunView) -> str:
    if view.attempt is None:
        return "no attempt has started yet"
    return "nothing has been recorded yet" if view.telemetry else "no metrics: telemetry is off"


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

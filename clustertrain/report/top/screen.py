"""``clustertrain top`` as lines of text that fit a terminal: head, rows of GPUs and ranks, events.

Every line is built by itself and never wrapped: a table of rich would cost ten times as much, each second.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence

import msgspec
from rich.text import Text

from clustertrain.report import terminal
from clustertrain.report.status import STYLE
from clustertrain.report.terminal import Glyphs, brief_time, duration, meter, percent, used_of
from clustertrain.report.top.state import EventView, NodeView, Row, View

WIDE = 120
SORTS = ("node", "utilization", "memory", "power", "temperature", "step")
FEWEST_ROWS, MOST_EVENTS = 3, 6
MOST_LINES = 4  # of one event, or one trouble
_NODE_CELLS = 14
_OF_NODE = ("Node", "CPU", "Host GiB", "Age")


class Shown(msgspec.Struct):
    """What the reader has chosen: the sorting, and how many rows are scrolled away."""

    sort: str = SORTS[0]
    skip: int = 0


def lines(view: View, width: int, height: int | None, signs: Glyphs, shown: Shown) -> list[Text]:
    """The frame; ``height`` None: as long as it takes. Moves ``shown.skip`` back into what there is."""
    head, rows = _head(view, width, signs), _sorted(view.rows, shown.sort)
    columns, left_out = _fitting(_columns(view, width, signs), width)
    titles = [_titles(columns)] if rows else [Text(_nothing(view))]
    troubles = [*_troubles(view, width), *_left_out(left_out if rows else [], width)]
    if height is None:
        found = [*head, *troubles, *titles, *_rows(rows, columns), *_events(view.events, width)]
    else:
        keys = f"q quit  s sort: {shown.sort}"
        free = height - len(head) - len(titles) - 1
        least = min(len(rows), FEWEST_ROWS)
        troubles = troubles[: max(0, free - least)]
        free -= len(troubles)
        # Rows come first, but for some lines of events where the terminal is not tiny.
        events = _events(view.events, width, max(free - len(rows), free // 4))
        room = max(0, free - len(events))
        shown.skip = max(0, min(shown.skip, len(rows) - room))
        below = len(rows) - shown.skip - room
        if shown.skip or below > 0:
            keys += f"  up/down scroll ({shown.skip} above, {max(0, below)} below)"
        visible = _rows(rows[shown.skip : shown.skip + room], columns)
        blank = [Text()] * (room - len(visible))
        found = [*head, *troubles, *titles, *visible, *events, *blank, Text(keys, style="bold")][-height:]
    return [_cut(line, width) for line in found]


def _cut(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.overflow = "crop"
    if line.cell_len > width:
        line.truncate(width, overflow="crop")
    return line


def _head(view: View, width: int, signs: Glyphs) -> list[Text]:
    state = view.state or "asking the scheduler"
    first = Text.assemble((view.run, "bold"), "  ", (state, STYLE.get(state, "red") if view.state else "cyan"))
    about = [
        f"job {view.job_id} ({view.backend})" if view.job_id else "",
        f"attempt {view.attempt}" if view.attempt else "",
    ]
    about.append(time.strftime("%H:%M:%S", time.localtime(view.t)))
    first.append("  " + signs.dot.join(about))
    found = [first]
    waits = _waits(view)
    if waits:
        found.append(Text(waits, style="yellow"))
    if view.step is not None:
        found.append(_progress(view, width, signs))
    found += _joined(_pace(view), width, signs)
    if view.scheduler_silent:
        found.append(Text(f"the scheduler gave no answer: {view.scheduler_silent.splitlines()[0]}", style="red"))
    return found


def _waits(view: View) -> str:
    if view.state == "pending" or view.pending_reason or view.start_estimate:
        when = f", expected to start {terminal.moment(view.start_estimate)}" if view.start_estimate else ""
        return f"waits for {view.pending_reason or 'the scheduler'}{when}"
    if view.state in ("completed", "failed", "cancelled"):
        return f"the run has ended ({view.ending or view.state}); this is its last state"
    if view.state == "requeued":
        return "between two attempts; this is the state of the last one"
    if not view.telemetry:
        return "telemetry is off in the recipe ([telemetry] enabled = false)"
    return ""


def _progress(view: View, width: int, signs: Glyphs) -> Text:
    if not view.total_steps:
        return Text(f"step {view.step}")
    share = min(1.0, (view.step or 0) / view.total_steps)
    before = f"step {view.step}/{view.total_steps} "
    after = f" {share:.0%}" + (f"  {_eta(view)}" if view.eta_s is not None else "")
    return Text(before) + meter(share, max(8, min(40, width - len(before) - len(after))), "green", signs) + Text(after)


def _eta(view: View) -> str:
    """What it counts is said, as an estimate without the checkpoints to come would be too early."""
    counted = "saves, evals not counted" if view.overhead is None else f"{view.overhead:.0%} for saves, evals"
    return f"about {duration(view.eta_s or 0.0)} left ({counted})"


def _joined(parts: Sequence[str], width: int, signs: Glyphs) -> list[Text]:
    """In as few lines as they fit."""
    found: list[str] = []
    for part in parts:
        if found and len(found[-1]) + len(signs.dot) + len(part) <= width:
            found[-1] += signs.dot + part
        else:
            found.append(part)
    return [Text(line) for line in found]


def _pace(view: View) -> list[str]:
    parts = []
    if view.step_s is not None:
        parts.append(f"{brief_time(view.step_s)} a step")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    if view.goodput is not None and view.wall_s:
        parts.append(f"goodput {view.goodput:.0%} of {duration(view.wall_s)}")
    if view.since_step_s is not None and view.since_step_s > max(30.0, 10 * (view.step_s or 0.0)):
        parts.append(f"no step for {duration(view.since_step_s)}")
    if view.allocation_ends is not None:
        left = view.allocation_ends - view.t
        early = " (before the end)" if view.eta_s is not None and 0 < left < view.eta_s else ""
        if left > 0:
            parts.append(f"time limit in {duration(left)}{early}")
    return parts


def _troubles(view: View, width: int) -> list[Text]:
    """Nodes that have something to say, and why GPUs have no figures; alike ones in one line."""
    groups: dict[str, list[str]] = {}
    for node in view.nodes:
        if node.trouble:
            groups.setdefault(node.trouble, []).append(node.node)
    gpus: dict[str, list[str]] = {}
    for row in view.rows:
        if row.uuid and row.utilization is None and row.reason and row.reason not in groups:
            gpus.setdefault(row.reason, []).append(f"GPU {row.uuid if row.gpu is None else row.gpu} of {row.node}")
    found = [f"! {_names(nodes, 'nodes')}: {trouble}" for trouble, nodes in groups.items()]
    found += [f"! {_names(names, 'GPUs')}: {reason}" for reason, names in gpus.items()]
    return [Text(line, style="yellow") for text in found for line in _wrapped(text, width, 2)]


def _left_out(titles: Sequence[str], width: int) -> list[Text]:
    if not titles:
        return []
    return [Text(line) for line in _wrapped(f"no room for {', '.join(titles)}: a wider terminal has them", width, 2)]


def _wrapped(text: str, width: int, indent: int, most: int = MOST_LINES) -> list[str]:
    """At spaces, the lines after the first indented; what goes beyond ``most`` lines is cut, with a sign."""
    lines = textwrap.wrap(text, max(width, indent + 8), subsequent_indent=" " * indent)
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: width - 3].rstrip() + " .."]
    return lines


def _names(names: Sequence[str], what: str) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more {what}"


_Column = tuple[str, int, Callable[[Row], "str | Text"], bool]


def _nothing(view: View) -> str:
    if view.attempt is None:
        return "no attempt has started yet"
    return "nothing has been recorded yet" if view.telemetry else "no figures: telemetry is off"


def _titles(columns: Sequence[_Column]) -> Text:
    return Text(" ".join(_cell(title, cells, left) for title, cells, _, left in columns), style="bold")


def _rows(rows: Sequence[Row], columns: Sequence[_Column]) -> list[Text]:
    """A line each; what is of the node stands in the first of its lines."""
    found, before = [], None
    for row in rows:
        cells = []
        for title, width, show, left in columns:
            again = row.node == before and title in _OF_NODE
            cells.append(_padded("" if again else show(row), width, left))
        found.append(Text(" ").join(cells))
        before = row.node
    return found


def _cell(text: str, cells: int, left: bool) -> str:
    return text[:cells].ljust(cells) if left else text[:cells].rjust(cells)


def _padded(value: str | Text, cells: int, left: bool) -> Text:
    if isinstance(value, str):
        return Text(_cell(value, cells, left))
    rest = " " * max(0, cells - value.cell_len)
    return value + Text(rest) if left else Text(rest) + value


def _columns(view: View, width: int, signs: Glyphs) -> list[_Column]:
    """Title, cells, what is shown, aligned left."""
    wide = width >= WIDE
    nodes = {n.node: n for n in view.nodes}
    name = min(max((len(r.node) for r in view.rows), default=4), 24 if wide else _NODE_CELLS)
    with_gpus = any(r.uuid for r in view.rows)
    bar = 6 if not wide else 16 if width >= 140 else 10
    found: list[_Column] = [("Node", max(4, name), lambda r: _short(r.node, max(4, name), signs), True)]
    if with_gpus:
        found += [
            ("GPU", 3, lambda r: _whole(r.gpu, signs), False),
            ("Util", bar + 5, lambda r: _use(r, bar, signs), True),
            ("GiB", 7, lambda r: _memory(r, signs), False),
            ("W", 4, lambda r: _number(r.power_w, signs), False),
            (signs.degree, 3, lambda r: _number(r.temperature_c, signs), False),
            ("MHz", 4, lambda r: _number(r.sm_clock_mhz, signs), False),
            ("Held", 4, lambda r: _held(r, signs), True),
        ]
    if wide and any(r.sm_activity is not None for r in view.rows):
        found.append(("SM", 4, lambda r: percent(r.sm_activity, signs), False))
        found.append(("Tens", 4, lambda r: percent(r.tensor_activity, signs), False))
    found += [
        ("Rank", 4, lambda r: _whole(r.rank, signs), False),
        ("Phase", 10, lambda r: r.phase or signs.dash, True),
        ("Step", 9 if wide else 7, lambda r: _step(r, signs), False),
    ]
    if wide or not with_gpus:
        found.append(("s/step", 8, lambda r: signs.dash if r.step_s is None else brief_time(r.step_s), False))
        found.append(("Wait", 4, lambda r: percent(r.data_wait_share, signs), False))
        found.append(("CPU", 4, lambda r: percent(_of(nodes, r).cpu, signs), False))
    if wide:
        found.append(("Host GiB", 9, lambda r: _host_memory(_of(nodes, r), signs), False))
        found.append(("Age", 5, lambda r: _age(_of(nodes, r), signs), False))
    return found


# What goes first where the columns do not fit; "bar" is that of the utilization, and what is not named here stays.
_DROPPED = ("Age", "Host GiB", "CPU", "Wait", "s/step", "Tens", "SM", "MHz", "°C", "C", "Held", "W", "bar", "GiB",
            "Rank", "Phase")  # fmt: skip


def _fitting(columns: Sequence[_Column], width: int) -> tuple[list[_Column], list[str]]:
    """Those that fit, and the titles of the others."""
    kept, gone = list(columns), []
    for title in _DROPPED:
        if sum(cells + 1 for _, cells, _, _ in kept) - 1 <= width:
            break
        if title == "bar":
            kept = [("Util", 5, _share, False) if c[0] == "Util" else c for c in kept]
        elif any(c[0] == title for c in kept):
            kept = [c for c in kept if c[0] != title]
            gone.append(title)
    return kept, gone


def _of(nodes: dict[str, NodeView], row: Row) -> NodeView:
    return nodes.get(row.node) or NodeView(node=row.node)


def _short(node: str, cells: int, signs: Glyphs) -> str:
    """A long name without its domain; else its end, which is what differs between nodes."""
    if len(node) > cells:
        node = node.partition(".")[0]
    return node if len(node) <= cells else ".." + node[-(cells - 2) :]


def _whole(value: int | None, signs: Glyphs) -> str:
    return signs.dash if value is None else str(value)


def _number(value: float | None, signs: Glyphs) -> str:
    return signs.dash if value is None else f"{value:.0f}"


def _use(row: Row, cells: int, signs: Glyphs) -> Text:
    if row.utilization is None:
        return Text((row.reason or signs.dash).partition(":")[0][: cells + 5])  # in full among the troubles
    style = terminal.grade(row.utilization)
    return meter(row.utilization, cells, style, signs) + Text(f"{row.utilization:>5.0%}", style=style)


def _share(row: Row) -> Text:
    if row.utilization is None:
        return Text("none")  # why stands among the troubles
    return Text(f"{row.utilization:.0%}", style=terminal.grade(row.utilization))


def _memory(row: Row, signs: Glyphs) -> Text:
    used, total = row.memory_used_gib, row.memory_total_gib
    full = used is not None and total and used >= 0.97 * total
    return Text(used_of(used, total, signs), style="bold yellow" if full else "")


def _held(row: Row, signs: Glyphs) -> Text:
    """P, T, H: held down by the power limit, by heat, by the hardware. The power limit is common and no fault."""
    letters = "".join({"power": "P", "thermal": "T", "hardware": "H"}[w] for w in row.throttled)
    return Text(letters or signs.dash, style="bold red" if set(letters) & {"T", "H"} else "")


def _step(row: Row, signs: Glyphs) -> Text:
    late = row.behind is not None and row.behind > 1
    return Text(_whole(row.step, signs), style="bold yellow" if late else "")


def _host_memory(node: NodeView, signs: Glyphs) -> str:
    return used_of(node.memory_used_gib, node.memory_total_gib, signs)


def _age(node: NodeView, signs: Glyphs) -> str:
    if node.ended:
        return "ended"
    return signs.dash if node.age_s is None else duration(node.age_s).partition("m")[0] + "m" * (node.age_s >= 59.5)


def _sorted(rows: Sequence[Row], by: str) -> list[Row]:
    """By node as the run has them; by a figure with the highest first, by step with the one farthest behind."""
    keys: dict[str, Callable[[Row], float | None]] = {
        "utilization": lambda r: r.utilization,
        "memory": lambda r: r.memory_used_gib,
        "power": lambda r: r.power_w,
        "temperature": lambda r: r.temperature_c,
        "step": lambda r: None if r.step is None else -r.step,
    }
    key = keys.get(by)
    if key is None:
        return list(rows)
    known = [(key(r), r) for r in rows]
    return [r for _, r in sorted(known, key=lambda p: float("inf") if p[0] is None else -p[0])]


_SEVERITY = {"critical": "bold red", "warning": "bold yellow"}


def _events(events: Sequence[EventView], width: int, room: int | None = None) -> list[Text]:
    """The last ones in at most ``room`` lines; alerts that were not cleared since stay, whatever came after them."""
    cleared: set[str] = set()
    still = []
    for e in reversed(events):
        if e.event == "alert" and e.text.startswith("cleared: "):
            cleared.add(e.text.removeprefix("cleared: "))
        elif e.event == "alert" and e.text.partition(": ")[2] not in cleared:
            still.append(e)
    wanted = [*still, *(e for e in reversed(events) if e not in still)][:MOST_EVENTS]
    kept: list[tuple[float, list[Text]]] = []
    left = MOST_EVENTS * MOST_LINES if room is None else room
    for e in wanted:
        if left > 0:
            kept.append((e.t, _event(e, width, min(left, MOST_LINES))))
            left -= len(kept[-1][1])
    return [line for _, lines in sorted(kept, key=lambda k: k[0]) for line in lines]


def _event(event: EventView, width: int, most: int) -> list[Text]:
    style = "" if event.text.startswith("cleared: ") else _SEVERITY.get(event.severity or "", "")
    at = time.strftime("%H:%M:%S ", time.localtime(event.t))
    first, *more = _wrapped(at + " ".join(event.text.split()), width, len(at), most)
    return [Text.assemble(at, (first[len(at) :], style)), *(Text(line, style=style) for line in more)]

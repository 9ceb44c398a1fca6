"""What ``clustertrain top`` shows instead of its table: the keys, or one GPU and rank with the end of its log."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.text import Text

from clustertrain.durations import format_duration, format_step_time
from clustertrain.printable import printable
from clustertrain.report.terminal import Glyphs, format_percent, format_used
from clustertrain.report.top.problems import find_problems, format_row_name
from clustertrain.report.top.table import row_key
from clustertrain.report.top.view import GpuRow, RunView

_KEYS = (
    ("q, Ctrl-C", "quit; the run continues"),
    ("up, down, k, j", "select a row"),
    ("PgUp, PgDn, b, space", "move by half a screen"),
    ("Enter, l", "show all values of the selected row, and the end of its rank's log"),
    ("s", "sort by problems, node, utilization, memory, power, temperature or step"),
    ("/", "show only matching rows: `rank 5` or `5`, `gpu 3`, part of a node's name, of a UUID or of a problem; all "
          "terms must match"),
    ("Esc", "show all rows again, or leave this page"),
    ("h, ?", "this page"),
)  # fmt: skip
_COLUMNS = (
    ("Util", "share of time in which a kernel ran"),
    ("GiB", "GPU memory in use, of all"),
    ("Held", "why the clock is lowered: P power limit (common), T heat, H hardware"),
    ("SM, Tens", "activity of the multiprocessors and of the tensor cores"),
    ("Wait", "share of the time in which the rank waits for data"),
    ("Age", "age of the node's newest sample"),
)


def render_help(width: int, height: int) -> list[Text]:
    """Return the page of keys and columns in ``height`` lines."""
    lines = [Text("Keys", style="bold"), *_definitions(_KEYS, width)]
    lines += [Text(), Text("Columns", style="bold"), *_definitions(_COLUMNS, width)]
    return [_crop(line, width) for line in _fill(lines, height, "any key: back")]


def _definitions(pairs: Sequence[tuple[str, str]], width: int) -> list[Text]:
    indent = max(len(term) for term, _ in pairs) + 4
    lines = []
    for term, text in pairs:
        first, *more = textwrap.wrap(text, max(20, width - indent))
        lines.append(Text.assemble("  ", (f"{term:<{indent - 2}}", "cyan"), first))
        lines += [Text(" " * indent + line) for line in more]
    return lines


def _fill(lines: list[Text], height: int, footer: str) -> list[Text]:
    lines = lines[: height - 1]
    return [*lines, *[Text()] * (height - 1 - len(lines)), Text(footer, style="bold")]


def render_details(
    view: RunView, row: GpuRow, log: Sequence[str], log_path: str, width: int, height: int, signs: Glyphs
) -> list[Text]:
    """Return the page of one GPU and rank in ``height`` lines, with as much of the log's end as has room."""
    problem = next((p for p in find_problems(view.rows) if row_key(p.row) == row_key(row)), None)
    lines = [Text(format_row_name(row), style="bold")]
    if problem is not None:
        lines += [
            Text(line, style="yellow") for line in textwrap.wrap(f"! {problem.text}".replace("°C", signs.degree), width)
        ]
    lines += _definitions([pair for pair in _facts(view, row, signs) if pair[1]], width)
    if log_path:
        title = f"End of {log_path}"
        lines += [Text(), *(Text(title[i : i + width], style="bold") for i in range(0, len(title), width))]
        room = height - len(lines) - 1
        lines += [Text(f"  {printable(line)}") for line in log[-room:] if room > 0]
    return [_crop(line, width) for line in _fill(lines, height, "any key: back  up/down: another row")]


def _crop(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="crop")
    return line


def _facts(view: RunView, row: GpuRow, signs: Glyphs) -> list[tuple[str, str]]:
    node = next((n for n in view.nodes if n.node == row.node), None)
    age = None if node is None else node.age_s
    facts = []
    if row.uuid is not None:
        facts += [
            ("GPU", f"{row.name or ''}  {row.uuid}".strip()),
            ("utilization", format_percent(row.utilization, signs)),
            ("activity", _join(_percent("SM", row.sm_activity), _percent("tensor cores", row.tensor_activity))),
            ("memory", f"{format_used(row.memory_used_gib, row.memory_total_gib, signs)} GiB"),
            ("power", _number(row.power_w, "W")),
            ("temperature", _number(row.temperature_c, signs.degree)),
            ("SM clock", _number(row.sm_clock_mhz, "MHz")),
            ("held by", ", ".join(row.throttled)),
        ]
    behind = f", {row.behind} behind" if row.behind else ""
    return [
        *facts,
        ("step", "" if row.step is None else f"{row.step}{behind}, phase {row.phase or 'unknown'}"),
        ("time per step", "" if row.step_s is None else format_step_time(row.step_s)),
        ("waits for data", "" if row.data_wait_share is None else f"{row.data_wait_share:.0%} of the time"),
        ("sampled", "" if age is None else f"{format_duration(age)} ago"),
    ]


def _percent(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.0%}"


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.0f} {unit}"


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)

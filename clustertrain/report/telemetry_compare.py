"""``clustertrain telemetry compare`` as text."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.report import insights, status, terminal
from clustertrain.report.runs.compare_text import said
from clustertrain.report.terminal import Glyphs
from clustertrain.telemetry.analysis.compare import FIGURES, Comparison, Figure, Side
from clustertrain.telemetry.report_schema import Note

WIDE = 76
ALIKE = 0.02  # a ratio nearer to 1 than this is not called better or worse


def show(found: Comparison, console: Console) -> None:
    terminal.emit(console, *render(found, console.width, terminal.glyphs(console)))


def render(found: Comparison, width: int, signs: Glyphs = terminal.UNICODE) -> list[RenderableType]:
    """Below ``WIDE`` columns without the differences, which the ratios tell as well."""
    titles = {name: rule.title for name, rule in FIGURES.items()}
    blocks: list[list[RenderableType]] = [
        [_sides(found, signs)],
        _figures(found.figures, titles, width, signs),
        _goodput(found.goodput, width, signs),
        _settings(found, signs),
        _notes("Notes that only A has", found.only_a),
        _notes("Notes that only B has", found.only_b),
    ]
    return [part for block in blocks if block for part in ("", *block)][1:]


def _sides(found: Comparison, signs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, side in (("A", found.a), ("B", found.b)):
        table.add_row(Text(name, style="bold"), _side(side, signs))
    if unequal := _unequal(found):
        table.add_row("", unequal)
    return table


def _unequal(found: Comparison) -> str:
    """What of two runs of different sizes can be compared, and what cannot."""
    steps = found.figures["steps"]
    words = [f"{found.a.gpus:,} and {found.b.gpus:,} GPUs"] if found.a.gpus != found.b.gpus else []
    words += [f"{steps.a:,.0f} and {steps.b:,.0f} steps"] if steps.difference and steps.a is not None else []
    if not words:
        return ""
    return (
        f"{', '.join(words)}: steps, GPU-hours and the energy of a GPU are of the whole run and not scaled; "
        "compare tokens/s a GPU, the energy a token, and shares"
    )


def _side(side: Side, signs: Glyphs) -> Text:
    gpus = f"{_count(side.gpus, 'GPU')}" if side.gpus else "no GPU figures"
    where = f"{_count(side.nodes, 'node')}, {gpus}" + (f" ({', '.join(side.gpu_names)})" if side.gpu_names else "")
    words: list[str | Text] = [side.run]
    words += [status.styled(side.state)] if side.state else []
    words += [where, _count(side.attempts, "attempt")] + ([f"job {side.job_id}"] if side.job_id else [])
    return Text(signs.dot).join(Text.assemble(w) for w in words)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _figures(
    figures: Mapping[str, Figure], titles: Mapping[str, str], width: int, signs: Glyphs
) -> list[RenderableType]:
    """Those that neither has are left to the JSON, but for their reason."""
    table = _table("", width)
    reasons: dict[str, list[str]] = {}
    for name, figure in figures.items():
        for side, why in figure.missing.items():
            reasons.setdefault(f"{side.upper()}: {why}", []).append(titles[name])
        if figure.a is not None or figure.b is not None:
            _row(table, titles[name], figure, signs)
    lines = [Text(f"{signs.dash} {why} ({', '.join(names)})") for why, names in reasons.items()]
    return [table, *lines] if table.row_count else list(lines)


def _table(title: str, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    for name in ("A", "B", *(["B - A"] if width >= WIDE else []), "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _row(table: Table, title: str, figure: Figure, signs: Glyphs) -> None:
    largest = max((abs(v) for v in (figure.a, figure.b) if v is not None), default=0.0)
    values = [signs.dash if v is None else _shown(v, figure.unit, largest) for v in (figure.a, figure.b)]
    change = signs.dash if figure.difference is None else _signed(figure.difference, figure.unit, largest)
    ratio = signs.dash if figure.ratio is None else f"{figure.ratio:.3f}"
    changes = [change, ratio] if len(table.columns) == 6 else [ratio]
    table.add_row(title, *values, *changes, _verdict(figure))


def _verdict(figure: Figure) -> Text:
    if figure.better is None or figure.ratio is None or abs(figure.ratio - 1) < ALIKE:
        return Text()
    better = (figure.ratio > 1) == (figure.better == "higher")
    return Text("better", style="green") if better else Text("worse", style="red")


_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms")),
    "J": ((3.6e6, "kWh"), (3600.0, "Wh"), (1.0, "J"), (1e-3, "mJ")),
}
_WHOLE = ("tokens/s", "steps", "W", "MHz")
_TITLED = ("tokens/s", "steps")  # units that stand in the row's title


def _shown(value: float, unit: str, largest: float) -> str:
    """``value`` of a row in the unit and with the places that suit its ``largest`` one, so that A, B and B - A are of
    one kind."""
    if unit == "ratio":
        return f"{value:.1%}"
    if not unit:
        return f"{value:,.4g}"
    size, shown = 1.0, "" if unit in _TITLED else unit
    if unit in _SCALES:
        size, shown = next((s for s in _SCALES[unit] if largest >= s[0]), _SCALES[unit][-1])
    value, largest = value / size, largest / size
    places = 0 if unit in _WHOLE or largest >= 100 else 1 if largest >= 10 else 2
    text = f"{value:,.{places}f}"
    if value and not float(text.replace(",", "")) and unit not in _WHOLE:
        text = f"{value:.2g}"
    return f"{text} {shown}".rstrip()


def _signed(difference: float, unit: str, largest: float) -> str:
    if not difference:
        return "0"
    if unit == "ratio":
        return f"{100 * difference:+.1f} pts"
    return ("+" if difference > 0 else "-") + _shown(abs(difference), unit, largest)


def _goodput(figures: Mapping[str, Figure], width: int, signs: Glyphs) -> list[RenderableType]:
    table = _table("Where the time went", width)
    for part, figure in figures.items():
        if figure.a or figure.b:
            _row(table, status.PART_WORDS[part], figure, signs)
    return [table] if table.row_count else []


def _settings(found: Comparison, signs: Glyphs) -> list[RenderableType]:
    if found.unknown:
        return [Text(f"The settings cannot be compared: {'; '.join(found.unknown)}")]
    if not found.settings:
        return [Text("The settings are the same")]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("Settings that differ", "A", "B"):
        table.add_column(title, overflow="fold")
    for setting in found.settings:
        table.add_row(setting.key, said(setting.a, signs.dash), said(setting.b, signs.dash))
    return [table]


def _notes(title: str, only: list[Note]) -> list[RenderableType]:
    return [Text(title, style="bold"), *insights.render(only)[1:]] if only else []

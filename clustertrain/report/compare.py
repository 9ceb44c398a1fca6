"""``clustertrain telemetry compare`` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.report import notes, status, terminal
from clustertrain.report.terminal import Glyphs
from clustertrain.telemetry.analysis.comparison import FIGURES, Comparison, Figure, Side
from clustertrain.telemetry.summary import Note

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
    if found.a.gpus != found.b.gpus:
        table.add_row("", f"{found.a.gpus:,} and {found.b.gpus:,} GPUs: compare what is said a GPU, or a token")
    return table


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
    values = [signs.dash if v is None else _shown(v, figure.unit) for v in (figure.a, figure.b)]
    change = signs.dash if figure.difference is None else _signed(figure.difference, figure.unit)
    ratio = signs.dash if figure.ratio is None else f"{figure.ratio:.3f}"
    changes = [change, ratio] if len(table.columns) == 6 else [ratio]
    table.add_row(title, *values, *changes, _verdict(figure))


def _verdict(figure: Figure) -> Text:
    if figure.better is None or figure.ratio is None or abs(figure.ratio - 1) < ALIKE:
        return Text()
    better = (figure.ratio > 1) == (figure.better == "higher")
    return Text("better", style="green") if better else Text("worse", style="red")


def _shown(value: float, unit: str) -> str:
    if unit == "ratio":
        return f"{value:.1%}"
    if unit == "s":
        return terminal.brief_time(value)
    if unit == "J":
        return terminal.energy(value, terminal.UNICODE) if value >= 1000 else terminal.joules(value)
    if unit in ("tokens/s", "steps"):
        return f"{value:,.0f}"
    if unit in ("W", "MHz"):
        return f"{value:,.0f} {unit}"
    return f"{value:,.4g} {unit}".rstrip()


def _signed(difference: float, unit: str) -> str:
    if not difference:
        return "0"
    if unit == "ratio":
        return f"{100 * difference:+.1f} pts"
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    return sign + _shown(abs(difference), unit)


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
        table.add_row(setting.key, _value(setting.a, signs), _value(setting.b, signs))
    return [table]


def _value(value: Any, signs: Glyphs) -> str:
    if value is None or value in ("", []):
        return signs.dash
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _notes(title: str, only: list[Note]) -> list[RenderableType]:
    return [Text(title, style="bold"), *notes.render(only)[1:]] if only else []

"""``clustertrain runs compare`` as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.report import plot, status, terminal
from clustertrain.report.runs.comparison import Comparison, Side
from clustertrain.report.terminal import Glyphs

HEIGHT, WIDE, TALLER = 16, 120, 22  # rows of a plot; from so many columns on the other one
AXES = {"step": "steps", "tokens": "tokens", "hours": "hours with nodes"}
MOST_SETTINGS = 40


def show(found: Comparison, console: Console) -> None:
    colours = console.is_terminal and console.color_system is not None
    terminal.emit(console, *render(found, console.width, terminal.glyphs(console), colours=colours))


def render(found: Comparison, width: int, signs: Glyphs, *, colours: bool) -> list[RenderableType]:
    parts: list[list[RenderableType]] = [[_runs(found, colours=colours)], [verdict(found)]]
    parts.append([_figures(found, signs)])
    for name in found.shown:
        lines = [plot.Line(s.letter, s.curves[name].x, s.curves[name].y) for s in found.runs]
        height = TALLER if width >= WIDE else HEIGHT
        parts.append(
            list(plot.plot(lines, width, height, signs, colours=colours, x_label=AXES[found.by], y_label=name))
        )
    parts.append(_settings(found, signs))
    parts.append([Text(f"note: {note}") for note in found.notes])
    return [part for block in parts if block for part in ("", *block)][1:]


def _runs(found: Comparison, *, colours: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for i, side in enumerate(found.runs):
        letter = Text(side.letter, style=f"bold {plot.style_of(i)}" if colours else "bold")
        table.add_row(letter, side.run, status.styled(side.state), f"recipe {side.recipe_hash}")
    return table


def verdict(found: Comparison) -> Text:
    """Which run is best, by what."""
    rule = f"{found.metric}, {'higher' if found.higher_is_better else 'lower'} is better"
    best = next((s for s in found.runs if s.run == found.winner), None)
    if best is None or best.best is None:
        having = sum(1 for s in found.runs if s.best)
        why = "the best values are equal" if having > 1 else "fewer than two runs have a value"
        return Text(f"By {rule}: none is best, {why}")
    return Text.assemble(
        f"By {rule}: ", (f"{best.letter} ({best.run})", "bold"), f" is best, {best.best.value:.6g} at step ",
        f"{best.best.step:,}",
    )  # fmt: skip


def _figures(found: Comparison, signs: Glyphs) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("")
    common = "" if found.common_step is None else f"at step {found.common_step:,}"
    for title in ("steps", "best", "at step", "last", common, "steps/s", "tokens", "GPU-h", "starts"):
        if title:
            table.add_column(title, justify="right")
    for side in found.runs:
        table.add_row(*_figures_of(side, signs, common=bool(common)))
    return table


def _figures_of(side: Side, signs: Glyphs, *, common: bool) -> list[str]:
    def shown(value: Any, form: str) -> str:
        return signs.dash if value is None else format(value, form)

    return [
        side.letter,
        shown(side.steps, ","),
        shown(side.best and side.best.value, ".5g"),
        shown(side.best and side.best.step, ","),
        shown(side.final and side.final.value, ".5g"),
        *([shown(side.at_common, ".5g")] if common else []),
        shown(side.steps_per_s, ".3g"),
        signs.dash if side.tokens is None else plot.brief(side.tokens),
        shown(side.gpu_hours, ".3g"),
        str(side.attempts),
    ]


def _settings(found: Comparison, signs: Glyphs) -> list[RenderableType]:
    if not found.settings:
        return [Text("The settings are the same")] if not any("settings" in note for note in found.notes) else []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("Settings that differ", *(s.letter for s in found.runs)):
        table.add_column(title, overflow="fold")
    for row in found.settings[:MOST_SETTINGS]:
        table.add_row(row.key, *(said(v, signs.dash) for v in row.values))
    more = len(found.settings) - MOST_SETTINGS
    return [table, *([Text(f"and {more} more: see --json")] if more > 0 else [])]


def said(value: Any, dash: str) -> str:
    if value is None or value in ("", []):
        return dash
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

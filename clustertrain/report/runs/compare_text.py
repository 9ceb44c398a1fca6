"""``clustertrain runs compare`` as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.config.parsing import text_of
from clustertrain.report import braille_plot, status, terminal
from clustertrain.report.runs.compare import Comparison, Side
from clustertrain.report.tables import Column, fitted
from clustertrain.report.terminal import Glyphs

HEIGHT, WIDE, TALLER = 16, 120, 22  # rows of a plot; from so many columns on the other one
AXES = {"step": "steps", "tokens": "tokens", "hours": "hours with nodes"}
MOST_SETTINGS = 40


def show(found: Comparison, console: Console) -> None:
    colours = console.is_terminal and console.color_system is not None
    terminal.emit(console, *render(found, console.width, terminal.glyphs(console), colours=colours))


def render(found: Comparison, width: int, signs: Glyphs, *, colours: bool) -> list[RenderableType]:
    parts: list[list[RenderableType]] = [[_runs(found, width, colours=colours)], [verdict(found)]]
    parts.append([_figures(found, width, signs)])
    across = terminal.FALLBACK if width == terminal.UNBROKEN else width
    for name in found.shown:
        lines = [braille_plot.Line(s.letter, s.curves[name].x, s.curves[name].y) for s in found.runs]
        height = TALLER if across >= WIDE else HEIGHT
        parts.append(
            list(braille_plot.plot(lines, across, height, signs, colours=colours, x_label=AXES[found.by], y_label=name))
        )
    parts.append(_settings(found, signs))
    parts.append([Text(f"note: {note}") for note in found.notes])
    return [part for block in parts if block for part in ("", *block)][1:]


def _runs(found: Comparison, width: int, *, colours: bool) -> Group:
    """A line for each, or two where one has no room for the id and the recipe's hash."""
    ids, states = (max(len(getattr(s, name)) for s in found.runs) for name in ("run", "state"))
    lines: list[Text] = []
    for i, side in enumerate(found.runs):
        name = Text.assemble((side.letter, f"bold {braille_plot.style_of(i)}" if colours else "bold"), f"  {side.run}")
        rest = " " * (states - len(side.state))
        about = Text.assemble(status.styled(side.state), f"{rest}  recipe {side.recipe_hash}")
        one = Text.assemble(name, " " * (ids - len(side.run) + 2), about)
        lines += [one] if len("A  ") + ids + 2 + about.cell_len <= width else [name, Text.assemble("   ", about)]
    for line in lines:
        line.no_wrap, line.overflow = True, "ignore"
    return Group(*lines)  # of texts by themselves rich would make one that wraps


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


def _figures(found: Comparison, width: int, signs: Glyphs) -> Table:
    common = [] if found.common_step is None else [f"at step {found.common_step:,}"]
    titles = ("", "steps", "best", "at step", "last", *common, "steps/s", "tokens", "GPU-h", "starts")
    cells = zip(*(_figures_of(side, signs, common=bool(common)) for side in found.runs), strict=True)
    columns = [Column(title, column, bool(title)) for title, column in zip(titles, cells, strict=True)]
    return fitted(columns, width, dropped=("starts", "tokens", "GPU-h", "steps/s"))


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
        signs.dash if side.tokens is None else braille_plot.brief(side.tokens),
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
    """A setting, as a recipe has it but for the quotes around a word."""
    if value is None or value in ("", [], ()):
        return dash
    return value if isinstance(value, str) else text_of(value)

"""Text output of ``clustertrain compare``."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.config.parsing.documents import format_value
from clustertrain.report import braille_plot, status, terminal
from clustertrain.report.runs import compare_telemetry
from clustertrain.report.runs.compare import ComparedRun, RunsComparison
from clustertrain.report.tables import Column, fit_table
from clustertrain.report.terminal import Glyphs

PLOT_HEIGHT, WIDE_PLOT_HEIGHT = 16, 22  # rows
WIDE_COLUMNS = 120  # terminal width from which plots are higher
AXIS_LABELS = {"step": "steps", "tokens": "tokens", "hours": "hours with nodes"}
MAX_SETTINGS = 40


def show(comparison: RunsComparison, console: Console) -> None:
    colours = console.is_terminal and console.color_system is not None
    terminal.emit(console, *render(comparison, console.width, terminal.glyphs(console), colours=colours))


def render(comparison: RunsComparison, width: int, signs: Glyphs, *, colours: bool) -> list[RenderableType]:
    blocks: list[list[RenderableType]] = [[_run_lines(comparison, width, colours=colours)], [verdict(comparison)]]
    blocks.append([_results_table(comparison, width, signs)])
    plot_width = terminal.DEFAULT_WIDTH if width == terminal.UNLIMITED_WIDTH else width
    for name in comparison.shown:
        lines = [braille_plot.PlotLine(s.letter, s.curves[name].x, s.curves[name].y) for s in comparison.runs]
        height = WIDE_PLOT_HEIGHT if plot_width >= WIDE_COLUMNS else PLOT_HEIGHT
        blocks.append(
            list(
                braille_plot.plot(
                    lines, plot_width, height, signs, colours=colours, x_label=AXIS_LABELS[comparison.by], y_label=name
                )
            )
        )
    blocks.append(_settings_table(comparison, signs))
    if comparison.telemetry is not None:
        blocks += compare_telemetry.render(comparison.telemetry, width, signs)
    blocks.append([Text(f"note: {note}") for note in comparison.notes])
    return [part for block in blocks if block for part in ("", *block)][1:]


def _run_lines(comparison: RunsComparison, width: int, *, colours: bool) -> Group:
    """Return one line per run, or two if the terminal is too narrow for the id and the recipe's hash."""
    id_width, state_width = (max(len(getattr(s, name)) for s in comparison.runs) for name in ("run", "state"))
    lines: list[Text] = []
    for i, side in enumerate(comparison.runs):
        name = Text.assemble(
            (side.letter, f"bold {braille_plot.line_style(i)}" if colours else "bold"), f"  {side.run}"
        )
        padding = " " * (state_width - len(side.state))
        details = Text.assemble(status.styled_state(side.state), f"{padding}  recipe {side.recipe_hash}")
        single_line = Text.assemble(name, " " * (id_width - len(side.run) + 2), details)
        lines += (
            [single_line]
            if len("A  ") + id_width + 2 + details.cell_len <= width
            else [name, Text.assemble("   ", details)]
        )
    for line in lines:
        line.no_wrap, line.overflow = True, "ignore"
    return Group(*lines)  # rich would join separate texts into one that wraps


def verdict(comparison: RunsComparison) -> Text:
    """Return which run is best by the deciding metric."""
    rule = f"{comparison.metric}, {'higher' if comparison.higher_is_better else 'lower'} is better"
    best = next((s for s in comparison.runs if s.run == comparison.winner), None)
    if best is None or best.best is None:
        num_with_value = sum(1 for s in comparison.runs if s.best)
        reason = "the best values are equal" if num_with_value > 1 else "fewer than two runs have a value"
        return Text(f"By {rule}: no best run, {reason}")
    return Text.assemble(
        f"By {rule}: ", (f"{best.letter} ({best.run})", "bold"), f" is best, {best.best.value:.6g} at step ",
        f"{best.best.step:,}",
    )  # fmt: skip


def _results_table(comparison: RunsComparison, width: int, signs: Glyphs) -> Table:
    common = [] if comparison.common_step is None else [f"at step {comparison.common_step:,}"]
    titles = ("", "steps", "best", "at step", "last", *common, "steps/s", "tokens", "GPU-h", "starts")
    cells = zip(*(_result_cells(side, signs, has_common_step=bool(common)) for side in comparison.runs), strict=True)
    columns = [Column(title, column, bool(title)) for title, column in zip(titles, cells, strict=True)]
    return fit_table(columns, width, drop_order=("starts", "tokens", "GPU-h", "steps/s"))


def _result_cells(side: ComparedRun, signs: Glyphs, *, has_common_step: bool) -> list[str]:
    def format_cell(value: Any, spec: str) -> str:
        return signs.dash if value is None else format(value, spec)

    return [
        side.letter,
        format_cell(side.steps, ","),
        format_cell(side.best and side.best.value, ".5g"),
        format_cell(side.best and side.best.step, ","),
        format_cell(side.final and side.final.value, ".5g"),
        *([format_cell(side.at_common, ".5g")] if has_common_step else []),
        format_cell(side.steps_per_s, ".3g"),
        signs.dash if side.tokens is None else braille_plot.format_compact(side.tokens),
        format_cell(side.gpu_hours, ".3g"),
        str(side.attempts),
    ]


def _settings_table(comparison: RunsComparison, signs: Glyphs) -> list[RenderableType]:
    if not comparison.settings:
        return [Text("The settings are equal")] if not any("settings" in note for note in comparison.notes) else []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("Settings that differ", *(s.letter for s in comparison.runs)):
        table.add_column(title, overflow="fold")
    for row in comparison.settings[:MAX_SETTINGS]:
        table.add_row(row.key, *(format_setting(v, signs.dash) for v in row.values))
    num_hidden = len(comparison.settings) - MAX_SETTINGS
    return [table, *([Text(f"and {num_hidden} more: see --json")] if num_hidden > 0 else [])]


def format_setting(value: Any, dash: str) -> str:
    """Format a setting as in a recipe, but without quotes around strings."""
    if value is None or value in ("", [], ()):
        return dash
    return value if isinstance(value, str) else format_value(value)

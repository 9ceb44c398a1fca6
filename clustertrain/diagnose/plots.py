"""Plots of findings: characters for a terminal, SVG for an .svg or .html file."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from clustertrain import fsio
from clustertrain.diagnose.registry import Finding, Plot
from clustertrain.errors import UsageError

TEXT_ROWS = 12  # rows of a plot in a terminal
_SVG_WIDTH, _SVG_HEIGHT = 720, 300  # pixels
_MARGIN_LEFT, _MARGIN_BOTTOM, _MARGIN_RIGHT = 70, 60, 20  # pixels
HEADROOM = 0.25  # shown above the first value, as a fraction of the range below it


def check_path(path: Path) -> None:
    """Raise UsageError if ``path`` is neither .svg nor .html, or its folder is missing or not writable."""
    if path.suffix not in (".svg", ".html"):
        message = f"unsupported extension {path.suffix}" if path.suffix else "no file extension"
        raise UsageError(f"--plot {path}: {message}", fix="name an .html or .svg file")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: no such folder: {path.parent}", fix="create it, or name another one")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--plot {path}: {path.parent} is not writable", fix="name a file in a writable folder")


def render_text(plot: Plot, width: int, *, dot: str = "•", line: str = "─", side: str = "│") -> list[str]:
    """Return the plot as lines of at most ``width`` characters: the curve, its axes and its marks."""
    low, high = _y_range(plot.y)
    labels = [f"{high:.4g}", f"{(low + high) / 2:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = width - margin - 1
    to_column = _x_scale(plot, columns - 1)
    cells: dict[int, list[float]] = {}
    for x, y in zip(plot.x, plot.y, strict=True):
        cells.setdefault(round(to_column(x)), []).append(y)
    grid = [[" "] * columns for _ in range(TEXT_ROWS)]
    for column, values in cells.items():
        level = (min(high, sum(values) / len(values)) - low) / (high - low)
        grid[TEXT_ROWS - 1 - round(level * (TEXT_ROWS - 1))][column] = dot
    names = {0: labels[0], TEXT_ROWS // 2: labels[1], TEXT_ROWS - 1: labels[2]}
    lines = [f"{names.get(i, ''):>{margin}}{side}{''.join(row).rstrip()}" for i, row in enumerate(grid)]
    lines.append(" " * margin + "└" * (line == "─") + "+" * (line != "─") + line * columns)
    lines.append(" " * (margin + 1) + _axis_line(f"{plot.x[0]:.3g}", plot.x_name, f"{plot.x[-1]:.3g}", columns))
    for name, x in plot.marks.items():
        column = round(min(max(to_column(x), 0), columns - 1))
        label = f"{name} = {x:.2g}"
        lines.append(" " * (margin + 1) + _pointer_line(label, column, columns))
    return lines


def _pointer_line(label: str, column: int, columns: int) -> str:
    if column + 2 + len(label) <= columns:
        return " " * column + f"^ {label}"
    return " " * max(0, column - 1 - len(label)) + f"{label} ^"


def _axis_line(left: str, middle: str, right: str, columns: int) -> str:
    return left + middle.center(columns - len(left) - len(right)) + right


def _y_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the visible range of ``values``; a diverging loss is clipped at the top."""
    low, high = min(values), max(values)
    first = max(values[0], values[min(len(values), 10) - 1])
    high = min(high, first + HEADROOM * (first - low)) if first > low else high
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _x_scale(plot: Plot, span: float) -> Callable[[float], float]:
    """Return a function that maps x values to 0 … ``span``."""

    def scale(x: float) -> float:
        return math.log(x) if plot.log_x else x

    first, last = scale(plot.x[0]), scale(plot.x[-1])
    return lambda x: (scale(x) - first) / (last - first) * span if last > first else 0.0


def write(path: Path, findings: Sequence[Finding]) -> None:
    """Write the plots of ``findings``, stacked vertically, to an .svg or .html file."""
    plotted = [(f, f.plot) for f in findings if f.plot is not None and len(f.plot.x) > 1]
    pictures = [
        _svg(f"{f.check}: {f.text}", plot, i * (_SVG_HEIGHT + _MARGIN_BOTTOM + 40))
        for i, (f, plot) in enumerate(plotted)
    ]
    height = max(1, len(plotted)) * (_SVG_HEIGHT + _MARGIN_BOTTOM + 40)
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SVG_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">{"".join(pictures) or _text(_MARGIN_LEFT, 30, "none of these checks has a plot")}</svg>'
    )
    if path.suffix == ".svg":
        fsio.write_text(path, picture + "\n")
        return
    fsio.write_text(
        path,
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>clustertrain diagnose</title>\n'
        "<style>:root{color-scheme:light dark}body{max-width:60em;margin:2em auto;font-family:sans-serif}"
        f"svg{{width:100%}}</style>\n{picture}\n</html>\n",
    )


def _svg(title: str, plot: Plot, top: int) -> str:
    low, high = _y_range(plot.y)
    to_x = _x_scale(plot, _SVG_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT)

    def point(x: float, y: float) -> tuple[float, float]:
        level = (min(high, y) - low) / (high - low)
        return _MARGIN_LEFT + to_x(x), top + 30 + (1 - level) * _SVG_HEIGHT

    line = " ".join("{:.1f},{:.1f}".format(*point(x, y)) for x, y in zip(plot.x, plot.y, strict=True))
    bottom = top + 30 + _SVG_HEIGHT
    parts = [
        _text(_MARGIN_LEFT, top + 16, title),
        f'<path d="M{_MARGIN_LEFT} {top + 30}V{bottom}H{_SVG_WIDTH - _MARGIN_RIGHT}" '
        'fill="none" stroke="currentColor"/>',
        f'<polyline points="{line}" fill="none" stroke="#2a78c8" stroke-width="2"/>',
        _text(4, top + 36, f"{high:.4g}"), _text(4, bottom, f"{low:.4g}"),
        _text(_MARGIN_LEFT, bottom + 16, f"{plot.x[0]:.3g}"), _text(_SVG_WIDTH - 60, bottom + 16, f"{plot.x[-1]:.3g}"),
        _text(_SVG_WIDTH / 2, bottom + 16, plot.x_name),
    ]  # fmt: skip
    for i, (name, x) in enumerate(plot.marks.items()):
        mark_x = min(max(_MARGIN_LEFT + to_x(x), _MARGIN_LEFT), _SVG_WIDTH - _MARGIN_RIGHT)
        parts.append(f'<path d="M{mark_x:.1f} {top + 30}V{bottom}" stroke="#c8502a" stroke-dasharray="4 3"/>')
        parts.append(_text(min(mark_x + 4, _SVG_WIDTH - 150), top + 46 + 14 * i, f"{name} = {x:.2g}"))
    return "".join(parts)


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor">{html.escape(text)}</text>'

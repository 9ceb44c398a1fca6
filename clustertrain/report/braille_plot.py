"""Line plots in the terminal: colored braille dots, or letters if colors are unavailable."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from rich.text import Text

from clustertrain.report.terminal import Glyphs

STYLES = ("blue", "red", "green", "magenta", "cyan", "yellow")
OVERLAP_LETTER = "*"  # a cell that several lines cross
_BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell, by row and column
_LOG_SCALE_RATIO = 30.0  # highest over lowest value from which the y axis is logarithmic


class PlotLine(msgspec.Struct, frozen=True):
    """One line of a plot."""

    letter: str
    """Marks the end of the line, and every point if colors are unavailable."""
    x: Sequence[float]
    y: Sequence[float]


def line_style(index: int) -> str:
    return STYLES[index % len(STYLES)]


def plot(
    lines: Sequence[PlotLine],
    width: int,
    height: int,
    signs: Glyphs,
    *,
    colours: bool,
    x_label: str,
    y_label: str,
    y_limits: tuple[float, float] | None = None,
) -> list[Text]:
    """Return a plot of ``width`` x ``height`` cells including the axes, or nothing if no line has a point.

    The y axis covers the values, or ``y_limits``, which must include them; then it is linear.
    """
    nonempty = [line for line in lines if len(line.y)]
    if not nonempty:
        return []
    logarithmic = y_limits is None and _is_logarithmic(nonempty)
    scale_y = math.log10 if logarithmic else float
    y_min, y_max = y_limits or _range([scale_y(y) for line in nonempty for y in line.y])
    x_min, x_max = _range([x for line in nonempty for x in line.x])
    ticks = _y_ticks(y_min, y_max, height - 2, logarithmic)
    label_width = max(map(len, ticks.values())) + 1
    canvas = _Canvas(max(10, width - label_width - 1), max(3, height - 2), braille=colours and signs.gap == " ")
    for index, line in enumerate(lines):
        points = [
            ((x - x_min) / (x_max - x_min), (scale_y(y) - y_min) / (y_max - y_min))
            for x, y in zip(line.x, line.y, strict=True)
        ]
        canvas.draw(index, line.letter, points)
    title = f"{y_label}, logarithmic" if logarithmic else y_label
    output = [Text(title)]
    for row in range(canvas.rows):
        tick = ticks.get(row, "")
        output.append(
            Text.assemble(f"{tick:>{label_width - 1}} ", _axis_char(signs), canvas.render_row(row, styled=colours))
        )
    output.append(_x_axis(x_min, x_max, label_width, canvas.columns, x_label))
    return output


def _axis_char(signs: Glyphs) -> str:
    return "│" if signs.bar == "█" else "|"


def _is_logarithmic(lines: Sequence[PlotLine]) -> bool:
    values = [y for line in lines for y in line.y]
    return min(values) > 0 and max(values) / min(values) >= _LOG_SCALE_RATIO


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    return (low, high) if high > low else (low - span / 2, high + span / 2)


def _y_ticks(low: float, high: float, rows: int, logarithmic: bool) -> dict[int, str]:
    count = min(5, rows)
    ticks = {}
    for i in range(count):
        row = round(i * (rows - 1) / max(1, count - 1))
        value = high - (high - low) * (row / max(1, rows - 1))
        ticks[row] = f"{10**value if logarithmic else value:.4g}"
    return ticks


def _x_axis(x_min: float, x_max: float, margin: int, columns: int, label: str) -> Text:
    """Return the x axis: both ends, the middle, and the label next to the middle."""
    midpoint = (x_min + x_max) / 2
    texts = [
        format_compact(x_min),
        f"{format_compact(round(midpoint) if x_max - x_min >= 10 else midpoint)} {label}",
        format_compact(x_max),
    ]
    line = [" "] * (columns + 1)
    for offset, text in zip((0, (columns - len(texts[1])) // 2, columns + 1 - len(texts[2])), texts, strict=True):
        line[offset : offset + len(text)] = text
    return Text(" " * margin + "".join(line))


def format_compact(value: float) -> str:
    """Format a number with a metric suffix, such as ``1.2M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


class _Canvas:
    """A canvas whose cells hold 2 x 4 braille dots or one letter."""

    def __init__(self, columns: int, rows: int, *, braille: bool) -> None:
        self.columns, self.rows = columns, rows
        self._dots_per_column, self._dots_per_row = (2, 4) if braille else (1, 1)
        self._braille = braille
        self._dots: dict[tuple[int, int], int] = {}
        self._line_indices: dict[tuple[int, int], int] = {}
        self._letters: dict[tuple[int, int], str] = {}

    def draw(self, line_index: int, letter: str, points: Sequence[tuple[float, float]]) -> None:
        """Draw straight lines through ``points``, given as 0-1 from the lower left."""
        max_x, max_y = self.columns * self._dots_per_column - 1, self.rows * self._dots_per_row - 1
        dots = [(round(x * max_x), round((1 - y) * max_y)) for x, y in points]
        for i, (x, y) in enumerate(dots):
            if i == 0:
                self._set_dot(line_index, letter, x, y)
                continue
            x0, y0 = dots[i - 1]
            num_dots = max(abs(x - x0), abs(y - y0), 1)
            for k in range(1, num_dots + 1):
                self._set_dot(
                    line_index, letter, round(x0 + (x - x0) * k / num_dots), round(y0 + (y - y0) * k / num_dots)
                )
        if dots:
            x, y = dots[-1]
            cell = (y // self._dots_per_row, x // self._dots_per_column)
            self._letters[cell], self._line_indices[cell] = letter, line_index

    def _set_dot(self, line_index: int, letter: str, x: int, y: int) -> None:
        cell = (y // self._dots_per_row, x // self._dots_per_column)
        if self._braille:
            self._dots[cell] = self._dots.get(cell, 0) | _BRAILLE_BITS[y % 4][x % 2]
        else:
            existing = self._letters.get(cell, letter)
            self._letters[cell] = letter if existing == letter else OVERLAP_LETTER
        self._line_indices[cell] = line_index

    def render_row(self, row: int, *, styled: bool) -> Text:
        text = Text()
        for column in range(self.columns):
            cell = (row, column)
            sign = self._letters.get(cell) or (chr(0x2800 + self._dots[cell]) if cell in self._dots else " ")
            text.append(sign, line_style(self._line_indices[cell]) if styled and cell in self._line_indices else None)
        return text

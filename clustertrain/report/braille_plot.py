"""Curves in the terminal: dots of braille in the terminal's own colours, letters where there are none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from rich.text import Text

from clustertrain.report.terminal import Glyphs

STYLES = ("blue", "red", "green", "magenta", "cyan", "yellow")
SEVERAL = "*"  # letters that meet in a cell
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell, by row and column
_LOG_FROM = 30.0  # the highest value over the lowest


class Line(msgspec.Struct, frozen=True):
    """``letter`` stands at the end of the line, and for its dots where there are no colours."""

    letter: str
    x: Sequence[float]
    y: Sequence[float]


def style_of(number: int) -> str:
    return STYLES[number % len(STYLES)]


def plot(
    lines: Sequence[Line], width: int, height: int, signs: Glyphs, *, colours: bool, x_label: str, y_label: str
) -> list[Text]:
    """``width`` x ``height`` cells, the axes in them. Nothing where no line has a point."""
    drawn = [line for line in lines if len(line.y)]
    if not drawn:
        return []
    logarithmic = _is_logarithmic(drawn)
    y_of = math.log10 if logarithmic else float
    low, high = _range([y_of(y) for line in drawn for y in line.y])
    left, right = _range([x for line in drawn for x in line.x])
    ticks = _y_ticks(low, high, height - 2, logarithmic)
    margin = max(map(len, ticks.values())) + 1
    field = _Field(max(10, width - margin - 1), max(3, height - 2), braille=colours and signs.none == " ")
    for number, line in enumerate(lines):
        points = [
            ((x - left) / (right - left), (y_of(y) - low) / (high - low)) for x, y in zip(line.x, line.y, strict=True)
        ]
        field.draw(number, line.letter, points)
    title = f"{y_label}, logarithmic" if logarithmic else y_label
    out = [Text(title)]
    for row in range(field.rows):
        tick = ticks.get(row, "")
        out.append(Text.assemble(f"{tick:>{margin - 1}} ", _edge(signs), field.row(row, styled=colours)))
    out.append(_x_axis(left, right, margin, field.columns, x_label))
    return out


def _edge(signs: Glyphs) -> str:
    return "│" if signs.bar == "█" else "|"


def _is_logarithmic(lines: Sequence[Line]) -> bool:
    values = [y for line in lines for y in line.y]
    return min(values) > 0 and max(values) / min(values) >= _LOG_FROM


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) or abs(high) or 1.0
    return (low, high) if high > low else (low - room / 2, high + room / 2)


def _y_ticks(low: float, high: float, rows: int, logarithmic: bool) -> dict[int, str]:
    count = min(5, rows)
    found = {}
    for i in range(count):
        row = round(i * (rows - 1) / max(1, count - 1))
        value = high - (high - low) * (row / max(1, rows - 1))
        found[row] = f"{10**value if logarithmic else value:.4g}"
    return found


def _x_axis(left: float, right: float, margin: int, columns: int, label: str) -> Text:
    """The ends and the middle, and the label beside the middle."""
    middle = (left + right) / 2
    texts = [brief(left), f"{brief(round(middle) if right - left >= 10 else middle)} {label}", brief(right)]
    line = [" "] * (columns + 1)
    for at, text in zip((0, (columns - len(texts[1])) // 2, columns + 1 - len(texts[2])), texts, strict=True):
        line[at : at + len(text)] = text
    return Text(" " * margin + "".join(line))


def brief(value: float) -> str:
    """``1.2M`` and the like."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


class _Field:
    """Cells of 2 x 4 dots (braille) or of one letter."""

    def __init__(self, columns: int, rows: int, *, braille: bool) -> None:
        self.columns, self.rows = columns, rows
        self._across, self._down = (2, 4) if braille else (1, 1)
        self._braille = braille
        self._dots: dict[tuple[int, int], int] = {}
        self._who: dict[tuple[int, int], int] = {}
        self._letters: dict[tuple[int, int], str] = {}

    def draw(self, number: int, letter: str, points: Sequence[tuple[float, float]]) -> None:
        """Points of 0-1 from the lower left, joined by straight lines."""
        wide, tall = self.columns * self._across - 1, self.rows * self._down - 1
        places = [(round(x * wide), round((1 - y) * tall)) for x, y in points]
        for i, (x, y) in enumerate(places):
            if i == 0:
                self._dot(number, letter, x, y)
                continue
            x0, y0 = places[i - 1]
            count = max(abs(x - x0), abs(y - y0), 1)
            for k in range(1, count + 1):
                self._dot(number, letter, round(x0 + (x - x0) * k / count), round(y0 + (y - y0) * k / count))
        if places:
            x, y = places[-1]
            cell = (y // self._down, x // self._across)
            self._letters[cell], self._who[cell] = letter, number

    def _dot(self, number: int, letter: str, x: int, y: int) -> None:
        cell = (y // self._down, x // self._across)
        if self._braille:
            self._dots[cell] = self._dots.get(cell, 0) | _DOTS[y % 4][x % 2]
        else:
            other = self._letters.get(cell, letter)
            self._letters[cell] = letter if other == letter else SEVERAL
        self._who[cell] = number

    def row(self, row: int, *, styled: bool) -> Text:
        found = Text()
        for column in range(self.columns):
            cell = (row, column)
            sign = self._letters.get(cell) or (chr(0x2800 + self._dots[cell]) if cell in self._dots else " ")
            found.append(sign, style_of(self._who[cell]) if styled and cell in self._who else None)
        return found

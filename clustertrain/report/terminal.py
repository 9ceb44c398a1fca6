"""Shared parts of the terminal reports: a console that is safe to pipe, glyphs, meters, sparklines and units.

Colors are the terminal's named ones and never carry meaning alone: a sign or a word repeats it. White, black and dim
are not used, so that reports are readable on light and dark backgrounds.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from clustertrain import reading
from clustertrain.printable import printable, unwrap_stream

MIN_WIDTH, MAX_WIDTH, DEFAULT_WIDTH = 50, 200, 80
UNLIMITED_WIDTH = 1 << 20  # for a pipe whose rows must not be wrapped


class Glyphs(msgspec.Struct, frozen=True):
    """The characters that a report is drawn with."""

    levels: str
    """Sparkline characters from empty to full."""
    gap: str
    """The sparkline character for a missing value."""
    bar: str
    empty: str
    dash: str
    dot: str
    degree: str
    line: str


# The full block is left out: sparklines in adjacent rows would merge.
UNICODE = Glyphs(levels="▁▂▃▄▅▆▇", gap=" ", bar="█", empty="·", dash="–", dot=" · ", degree="°C", line="─")
ASCII = Glyphs(levels="_.:-=+*", gap=" ", bar="#", empty=".", dash="-", dot=", ", degree="C", line="-")


def make_console(file: IO[str] | None = None, width: int | None = None, *, rows: bool = False) -> Console:
    """Return a console for ``file`` (stdout by default).

    A pipe gets plain text without escapes, as wide as COLUMNS, else 80; with ``rows``, which scripts read line by line,
    width is unlimited instead of 80. NO_COLOR and TERM=dumb are respected.
    """
    stream = unwrap_stream(file or sys.stdout)
    if width is None:
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if _is_terminal(stream) else _columns()
    width = (UNLIMITED_WIDTH if rows else DEFAULT_WIDTH) if width is None else max(MIN_WIDTH, min(width, MAX_WIDTH))
    # With FORCE_COLOR, rich would write escapes into a pipe.
    return _Console(
        file=stream, width=width, force_terminal=_is_terminal(stream), highlight=False, emoji=False, markup=False
    )


class _Console(Console):
    """A console that passes all text, including live displays, through :func:`printable`, but no control codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _columns() -> int | None:
    value = os.environ.get("COLUMNS", "")
    return int(value) if reading.is_unsigned_int(value) and int(value) else None


def emit(console: Console, *parts: RenderableType) -> None:
    """Print ``parts`` without trailing blanks in files and pipes; characters that the encoding lacks become ?."""
    with console.capture() as captured:
        console.print(*parts, sep="\n", crop=False)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    console.file.write(text.encode(console.encoding, "replace").decode(console.encoding))


def glyphs(console: Console) -> Glyphs:
    """Return the Unicode glyphs, or the ASCII ones if the output's encoding lacks block characters."""
    try:
        "".join(msgspec.structs.astuple(UNICODE)).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def utilization_style(ratio: float) -> str:
    """Return the color of a utilization, with the same limits as the insights."""
    return "red" if ratio < 0.15 else "yellow" if ratio < 0.7 else "green"


def meter(ratio: float | None, width: int, style: str, signs: Glyphs) -> Text:
    """Return a bar of ``width`` cells, empty and unstyled if the ratio is unknown."""
    if ratio is None:
        return Text(signs.empty * width)
    num_full = round(max(0.0, min(1.0, ratio)) * width)
    return Text.assemble((signs.bar * num_full, style), signs.empty * (width - num_full))


def resample(values: Sequence[float | None], count: int) -> list[float | None]:
    """Return the means of ``count`` equal parts of ``values``; fewer values are returned unchanged."""
    if len(values) <= count:
        return list(values)
    means: list[float | None] = []
    for i in range(count):
        chunk = values[i * len(values) // count : (i + 1) * len(values) // count]
        chunk_values = [v for v in chunk if v is not None]
        means.append(sum(chunk_values) / len(chunk_values) if chunk_values else None)
    return means


def sparkline(values: Sequence[float | None], width: int, signs: Glyphs) -> str:
    """Return ratios 0-1 as one line of at most ``width`` characters, oldest first, with a gap for missing values."""
    max_level = len(signs.levels) - 1
    cells = resample(values, width)
    return "".join(
        signs.gap if v is None else signs.levels[min(max_level, math.floor(max(0.0, v) * (max_level + 1)))]
        for v in cells
    )


def format_percent(ratio: float | None, signs: Glyphs) -> str:
    return signs.dash if ratio is None else f"{ratio:.0%}"


def format_number(value: float | None, signs: Glyphs, decimals: int = 0) -> str:
    return signs.dash if value is None else f"{value:.{decimals}f}"


def format_used(used: float | None, total: float | None, signs: Glyphs) -> str:
    """Format a used and a total amount in the same unit, such as ``61/80``."""
    if used is None and total is None:
        return signs.dash
    decimals = total is not None and total < 10
    return f"{format_number(used, signs, 1 if decimals else 0)}/{format_number(total, signs, 1 if decimals else 0)}"


def format_timestamp(t: float) -> str:
    """Format UTC epoch seconds in the local time zone, such as ``2026-01-31 12:00:05 CET``."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(t))


def format_energy(joules: float | None, signs: Glyphs) -> str:
    """Format an energy in kWh, or in Wh or J if it is small, such as ``1.23 kWh``."""
    if joules is None:
        return signs.dash
    if joules < 3600:
        return f"{joules:.0f} J"
    if joules < 3_600_000:
        return f"{joules / 3600:.1f} Wh"
    return f"{joules / 3_600_000:.2f} kWh"

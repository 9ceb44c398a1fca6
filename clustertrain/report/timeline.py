"""A job on one time axis, as text: its attempts, what they were in, how busy the GPUs were, and what happened."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clustertrain.report.terminal import Glyphs, sparkline
from clustertrain.telemetry.report_schema import AttemptSummary, Mark, Summary

LABEL = len("utilization") + 1
_SHOWN = 8  # events that are spelt out below; the rest is counted
_POINTS = 8  # at which a cell is looked at, to find what it is mostly in

# Letters of the phases, and their words; blank is the queue.
_PHASES = {
    "=": ("training", "green"),
    "s": ("start-up", "blue"),
    "r": ("restore", "magenta"),
    "e": ("evaluation", "cyan"),
    "c": ("checkpoint", "yellow"),
    "d": ("shutdown", "red"),
}
_OF_MARK = {"restored": "r", "checkpoint": "c", "evaluation": "e"}


class Kind(NamedTuple):
    """How an event stands on the timeline. Of two in one cell the one with the lower ``rank`` is seen; those that are
    ``told`` are spelt out below it."""

    sign: str
    word: str
    rank: int
    told: bool
    style: str = ""


_KINDS = {
    "gpu_lost": Kind("L", "GPU lost", 0, True, "bold red"),
    "xid": Kind("X", "XID", 1, True, "bold red"),
    "ecc": Kind("M", "memory error", 1, True, "bold red"),
    "alert": Kind("A", "alert", 2, True, "bold yellow"),
    "signal": Kind("!", "signal", 3, True, "bold yellow"),
    "requeued": Kind("Q", "requeue", 4, True, "bold yellow"),
    "stop_agreed": Kind("S", "agreed stop", 5, True, "bold yellow"),
    "gpu_back": Kind("B", "GPU back", 6, True),
    "save_given_up": Kind("G", "save given up", 7, True),
    "evaluation": Kind("e", "evaluation", 8, False),
    "checkpoint": Kind("c", "checkpoint", 9, False),
    "restored": Kind("r", "restore", 10, False),
    "first_step": Kind("f", "first step", 11, False),
    "telemetry_failed": Kind("T", "sampler's trouble", 12, True, "bold yellow"),
    "stopped": Kind("N", "not continued", 13, True, "bold yellow"),
    "ended": Kind("E", "end", 14, True),
    "started": Kind("s", "start", 15, False),
}
_OTHER = Kind("o", "other event", 16, True)


class Axis(NamedTuple):
    """``cells`` columns over the time from ``start`` to ``end``, UTC s."""

    start: float
    end: float
    cells: int

    def cell(self, t: float) -> int:
        share = (t - self.start) / (self.end - self.start)
        return min(self.cells - 1, max(0, int(share * self.cells)))

    def moment(self, cell: float) -> float:
        return self.start + (self.end - self.start) * cell / self.cells


def render(summary: Summary, width: int, signs: Glyphs, every: bool = False) -> list[RenderableType]:
    """Nothing where no time passed that anybody knows of."""
    axis = _axis(summary, width - LABEL)
    if axis is None:
        return []
    attempts = [a for a in summary.attempts if _span(a) is not None]
    marks = sorted((m for a in attempts for m in a.events), key=lambda m: m.t)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=LABEL - 1, no_wrap=True)
    table.add_column(no_wrap=True)
    if attempts:
        table.add_row("attempts", _attempts(attempts, axis, signs))
    phases = _phases(attempts, axis)
    if phases is not None:
        table.add_row("phases", phases)
    if any(g.timeline.utilization for g in summary.gpus):
        table.add_row("utilization", sparkline(_utilization(summary, axis), axis.cells, signs))
    if marks:
        table.add_row("events", _events(marks, axis))
    table.add_row("time", _ticks(axis))
    below = [*_flow(_legend(phases), axis.cells), *_flow(_counts(marks), axis.cells), *_told(marks, axis, every)]
    return [Text("Timeline", style="bold"), table, *(Padding(line, (0, 0, 0, LABEL)) for line in below)]


def _axis(summary: Summary, cells: int) -> Axis | None:
    times = [t for a in summary.attempts for t in (a.start, a.end, a.window.start, a.window.end) if t is not None]
    times += [t for t in (summary.window.start, summary.window.end) if t is not None]
    if not times or max(times) - min(times) < 1.0:
        return None
    return Axis(min(times), max(times), cells)


def _span(attempt: AttemptSummary) -> tuple[float, float] | None:
    start = attempt.start if attempt.start is not None else attempt.window.start
    if start is None:
        return None
    ends = [t for t in (attempt.end, attempt.window.end) if t is not None]
    return start, (attempt.end if attempt.end is not None else max([start, *ends]))


def _attempts(attempts: Sequence[AttemptSummary], axis: Axis, signs: Glyphs) -> Text:
    cells = [" "] * axis.cells
    for attempt in attempts:
        span = _span(attempt)
        if span is None:
            continue
        first, last = axis.cell(span[0]), axis.cell(span[1])
        label = f"{attempt.n} {attempt.ending or 'running'}"
        inside = last - first - 1
        label = label if len(label) <= inside else str(attempt.n) if len(str(attempt.n)) <= inside else ""
        body = label.ljust(max(inside, 0), signs.line) if not label else f"{label:{signs.line}<{inside}}"
        text = "[" + body + ("]" if attempt.ending else ">") if last > first else (str(attempt.n)[-1])
        cells[first : first + len(text)] = text
    return Text("".join(cells[: axis.cells]))


def _phases(attempts: Sequence[AttemptSummary], axis: Axis) -> Text | None:
    """None where no attempt told of a step: a script without a session."""
    pieces = _pieces_of(attempts)
    if pieces is None:
        return None
    starts = [start for start, _, _ in pieces]

    def at(t: float) -> str:
        i = bisect.bisect_right(starts, t) - 1
        return pieces[i][2] if i >= 0 and t < pieces[i][1] else " "

    text = Text()
    for cell in range(axis.cells):
        found = collections.Counter(at(axis.moment(cell + (i + 0.5) / _POINTS)) for i in range(_POINTS))
        sign = found.most_common(1)[0][0]
        text.append(sign, style=_PHASES[sign][1] if sign in _PHASES else "")
    return text


Piece = tuple[float, float, str]  # from, to, letter


def stretches(attempts: Sequence[AttemptSummary]) -> list[tuple[float, float, str]]:
    """What the run was in: from, to (UTC s), and the phase in words, in order and without overlap. Empty where no
    attempt told of a step."""
    return [(start, end, _PHASES[letter][0]) for start, end, letter in _pieces_of(attempts) or []]


def _pieces_of(attempts: Sequence[AttemptSummary]) -> list[Piece] | None:
    """None where no attempt told of a step: a script without a session."""
    if not any(m.kind == "first_step" for a in attempts for m in a.events):
        return None
    return sorted(piece for a in attempts for piece in _pieces(a))


def _pieces(attempt: AttemptSummary) -> list[Piece]:
    """What the attempt was in, in order and without overlap."""
    span = _span(attempt)
    if span is None:
        return []
    start, end = span
    marks = sorted(attempt.events, key=lambda m: m.t)
    first = next((m.t for m in marks if m.kind == "first_step"), end)
    stop = next((m.t for m in reversed(marks) if m.kind == "stop_agreed"), end)
    bounds = sorted({start, min(max(first, start), end), min(max(stop, first, start), end), end})
    letters = {start: "s", min(max(stop, first, start), end): "d", min(max(first, start), end): "="}
    base = [(a, b, letters.get(a, "=")) for a, b in itertools.pairwise(bounds)]
    for mark in marks:
        letter = _OF_MARK.get(mark.kind)
        if letter is not None and mark.end is not None:
            base = _over(base, mark.t, min(mark.end, end), letter)
    return base


def _over(base: list[Piece], start: float, end: float, letter: str) -> list[Piece]:
    """``base`` with one stretch laid over it. Marks come in order, so only the last pieces can be met."""
    at = len(base)
    while at and base[at - 1][1] > start:
        at -= 1
    kept, met = base[:at], base[at:]
    for a, b, was in met:
        kept += [(a, min(b, start), was)] if a < start else []
    if end > start:
        kept.append((start, end, letter))
    for a, b, was in met:
        kept += [(max(a, end), b, was)] if b > end else []
    return kept


def _utilization(summary: Summary, axis: Axis) -> list[float | None]:
    """The mean of all GPUs, by cell of the axis; None where none told."""
    begin = summary.window.start if summary.window.start is not None else axis.start
    total, number = [0.0] * axis.cells, [0] * axis.cells
    for gpu in summary.gpus:
        line = gpu.timeline
        for i, value in enumerate(line.utilization):
            if value is not None:
                first = axis.cell(begin + i * line.step_s)
                last = max(first, axis.cell(begin + (i + 1) * line.step_s - 1e-6))
                for cell in range(first, last + 1):
                    total[cell] += value
                    number[cell] += 1
    return [t / n if n else None for t, n in zip(total, number, strict=True)]


def _kind(mark: Mark) -> Kind:
    return _KINDS.get(mark.kind, _OTHER)


def _events(marks: Sequence[Mark], axis: Axis) -> Text:
    seen: dict[int, Kind] = {}
    for mark in marks:
        cell, kind = axis.cell(mark.t), _kind(mark)
        if cell not in seen or kind.rank < seen[cell].rank:
            seen[cell] = kind
    text = Text()
    for cell in range(max(seen) + 1):
        text.append(seen[cell].sign if cell in seen else " ", style=seen[cell].style if cell in seen else "")
    return text


_TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_TICK_CELLS = 12


def _ticks(axis: Axis) -> str:
    """Elapsed time, at round numbers."""
    length = axis.end - axis.start
    wanted = length * _TICK_CELLS / axis.cells
    step = next((s for s in _TICKS_S if s >= wanted), None) or -(-int(wanted) // 604800) * 604800
    cells = [" "] * axis.cells
    for n in range(int(length / step) + 1):
        label = elapsed(n * step)
        at = axis.cell(axis.start + n * step)
        if at + len(label) < axis.cells:
            cells[at : at + len(label)] = label
    return "".join(cells)


def elapsed(seconds: float) -> str:
    """``0``, ``45s``, ``30m``, ``1h30m``, ``2d``, ``1d12h``."""
    s, words = round(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if s >= size:
            words.append(f"{s // size}{unit}")
            s %= size
    return "".join(words[:2]) or "0"


def _legend(phases: Text | None) -> list[Text]:
    there = [] if phases is None else [sign for sign in _PHASES if sign in phases.plain]
    return [Text.assemble((sign, _PHASES[sign][1]), f" {_PHASES[sign][0]}") for sign in there]


def _counts(marks: Sequence[Mark]) -> list[Text]:
    number = collections.Counter(_kind(m) for m in marks)
    kinds = sorted(number, key=lambda kind: kind.rank)
    words = [(k, f"{number[k]:,} {k.word}{'s' * (number[k] != 1)}") for k in kinds]
    return [Text.assemble((kind.sign, kind.style), f" {text}") for kind, text in words]


def _flow(items: Sequence[Text], width: int) -> list[Text]:
    """As many on a line as fit, none broken in two."""
    lines: list[Text] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] = lines[-1] + Text("   ") + item
        else:
            lines.append(item)
    return lines


def _told(marks: Sequence[Mark], axis: Axis, every: bool) -> list[Text]:
    told = [m for m in marks if _kind(m).told]
    shown = told if every else told[-_SHOWN:]
    lines = [Text(f"{elapsed(m.t - axis.start):>7}  {_words(m)}", style=_kind(m).style) for m in shown]
    if len(shown) < len(told):
        lines.insert(0, Text(f"{len(told) - len(shown):,} earlier ones (--all shows them)"))
    return lines


def _words(mark: Mark) -> str:
    word = _KINDS[mark.kind].word if mark.kind in _KINDS else mark.kind.replace("_", " ")
    if not mark.text or mark.text.lower().startswith(word.lower()):
        return mark.text or word
    return f"{word}: {mark.text}"

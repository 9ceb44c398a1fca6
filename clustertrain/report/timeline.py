"""A job's timeline as text: attempts, phases, GPU utilization and events on one time axis."""

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
from clustertrain.run import state
from clustertrain.telemetry.report_schema import AttemptSummary, Summary, TimelineEvent

LABEL_WIDTH = len("utilization") + 1
_MAX_LISTED = 8  # events listed below the timeline; the others are counted
_SAMPLES_PER_CELL = 8  # points in time at which the phase of a cell is sampled

# Phases by letter; blank is time in the queue.
_PHASES = {
    "=": ("training", "green"),
    "s": ("start-up", "blue"),
    "r": ("restore", "magenta"),
    "e": ("evaluation", "cyan"),
    "c": ("checkpoint", "yellow"),
    "d": ("shutdown", "red"),
}
_EVENT_PHASES = {"restored": "r", "checkpoint": "c", "evaluation": "e"}


class EventStyle(NamedTuple):
    """The look of a kind of event on the timeline."""

    sign: str
    label: str
    priority: int
    """Of several events in one cell, the one with the lowest number is shown."""
    is_listed: bool
    """Whether the event is also listed below the timeline."""
    style: str = ""


_EVENT_STYLES = {
    "gpu_lost": EventStyle("L", "GPU lost", 0, True, "bold red"),
    "xid": EventStyle("X", "XID", 1, True, "bold red"),
    "ecc": EventStyle("M", "memory error", 1, True, "bold red"),
    "alert": EventStyle("A", "alert", 2, True, "bold yellow"),
    "signal": EventStyle("!", "signal", 3, True, "bold yellow"),
    "requeued": EventStyle("Q", "requeue", 4, True, "bold yellow"),
    "stop_agreed": EventStyle("S", "agreed stop", 5, True, "bold yellow"),
    "gpu_back": EventStyle("B", "GPU back", 6, True),
    "save_abandoned": EventStyle("G", "save given up", 7, True),
    "evaluation": EventStyle("e", "evaluation", 8, False),
    "checkpoint": EventStyle("c", "checkpoint", 9, False),
    "restored": EventStyle("r", "restore", 10, False),
    "first_step": EventStyle("f", "first step", 11, False),
    "telemetry_failed": EventStyle("T", "sampler error", 12, True, "bold yellow"),
    "stopped": EventStyle("N", "not continued", 13, True, "bold yellow"),
    "ended": EventStyle("E", "end", 14, True),
    "started": EventStyle("s", "start", 15, False),
}
_OTHER_STYLE = EventStyle("o", "other event", 16, True)


class Axis(NamedTuple):
    """A time axis of ``num_cells`` columns from ``start`` to ``end`` (UTC epoch s)."""

    start: float
    end: float
    num_cells: int

    def cell(self, t: float) -> int:
        share = (t - self.start) / (self.end - self.start)
        return min(self.num_cells - 1, max(0, int(share * self.num_cells)))

    def time_at(self, cell: float) -> float:
        return self.start + (self.end - self.start) * cell / self.num_cells


def render(summary: Summary, width: int, signs: Glyphs, show_all: bool = False) -> list[RenderableType]:
    """Render the timeline, or nothing if the job's duration is unknown or under a second."""
    axis = _axis(summary, width - LABEL_WIDTH)
    if axis is None:
        return []
    attempts = [a for a in summary.attempts if _span(a) is not None]
    marks = sorted((m for a in attempts for m in a.events), key=lambda m: m.t)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=LABEL_WIDTH - 1, no_wrap=True)
    table.add_column(no_wrap=True)
    if attempts:
        table.add_row("attempts", _attempt_row(attempts, axis, signs, is_over=summary.state in state.FINAL))
    phases = _phase_row(attempts, axis)
    if phases is not None:
        table.add_row("phases", phases)
    if any(g.timeline.utilization for g in summary.gpus):
        table.add_row("utilization", sparkline(_mean_utilization(summary, axis), axis.num_cells, signs))
    if marks:
        table.add_row("events", _event_row(marks, axis))
    table.add_row("time", _time_axis(axis))
    footer = [
        *_wrap_items(_legend(phases), axis.num_cells),
        *_wrap_items(_event_counts(marks), axis.num_cells),
        *_event_lines(marks, axis, show_all),
    ]
    return [Text("Timeline", style="bold"), table, *(Padding(line, (0, 0, 0, LABEL_WIDTH)) for line in footer)]


def _axis(summary: Summary, num_cells: int) -> Axis | None:
    times = [t for a in summary.attempts for t in (a.start, a.end, a.window.start, a.window.end) if t is not None]
    times += [t for t in (summary.window.start, summary.window.end) if t is not None]
    if not times or max(times) - min(times) < 1.0:
        return None
    return Axis(min(times), max(times), num_cells)


def _span(attempt: AttemptSummary) -> tuple[float, float] | None:
    start = attempt.start if attempt.start is not None else attempt.window.start
    if start is None:
        return None
    ends = [t for t in (attempt.end, attempt.window.end) if t is not None]
    return start, (attempt.end if attempt.end is not None else max([start, *ends]))


def _attempt_row(attempts: Sequence[AttemptSummary], axis: Axis, signs: Glyphs, *, is_over: bool) -> Text:
    cells = [" "] * axis.num_cells
    for attempt in attempts:
        span = _span(attempt)
        if span is None:
            continue
        first_cell, last_cell = axis.cell(span[0]), axis.cell(span[1])
        is_running = attempt is attempts[-1] and not is_over
        label = f"{attempt.n} {attempt.ending or ('running' if is_running else 'no end recorded')}"
        inner_width = last_cell - first_cell - 1
        label = label if len(label) <= inner_width else str(attempt.n) if len(str(attempt.n)) <= inner_width else ""
        body = label.ljust(max(inner_width, 0), signs.line) if not label else f"{label:{signs.line}<{inner_width}}"
        text = "[" + body + ("]" if attempt.ending else ">") if last_cell > first_cell else (str(attempt.n)[-1])
        cells[first_cell : first_cell + len(text)] = text
    return Text("".join(cells[: axis.num_cells]))


def _phase_row(attempts: Sequence[AttemptSummary], axis: Axis) -> Text | None:
    """Return the row of phase letters, or None for a script without a session, which reports no steps."""
    segments = _phase_segments(attempts)
    if segments is None:
        return None
    starts = [start for start, _, _ in segments]

    def phase_at(t: float) -> str:
        i = bisect.bisect_right(starts, t) - 1
        return segments[i][2] if i >= 0 and t < segments[i][1] else " "

    text = Text()
    for cell in range(axis.num_cells):
        letter_counts = collections.Counter(
            phase_at(axis.time_at(cell + (i + 0.5) / _SAMPLES_PER_CELL)) for i in range(_SAMPLES_PER_CELL)
        )
        letter = letter_counts.most_common(1)[0][0]
        text.append(letter, style=_PHASES[letter][1] if letter in _PHASES else "")
    return text


PhaseSegment = tuple[float, float, str]  # (start, end, letter)


def phase_spans(attempts: Sequence[AttemptSummary]) -> list[tuple[float, float, str]]:
    """Return (start, end, phase) in UTC epoch s, in order and without overlap; empty if no step was reported."""
    return [(start, end, _PHASES[letter][0]) for start, end, letter in _phase_segments(attempts) or []]


def _phase_segments(attempts: Sequence[AttemptSummary]) -> list[PhaseSegment] | None:
    """Return the segments of all attempts, or None for a script without a session, which reports no steps."""
    if not any(m.kind == "first_step" for a in attempts for m in a.events):
        return None
    return sorted(segment for a in attempts for segment in _attempt_segments(a))


def _attempt_segments(attempt: AttemptSummary) -> list[PhaseSegment]:
    """Return the phase segments of one attempt, in order and without overlap."""
    span = _span(attempt)
    if span is None:
        return []
    start, end = span
    marks = sorted(attempt.events, key=lambda m: m.t)
    first_step = next((m.t for m in marks if m.kind == "first_step"), end)
    stop = next((m.t for m in reversed(marks) if m.kind == "stop_agreed"), end)
    boundaries = sorted({start, min(max(first_step, start), end), min(max(stop, first_step, start), end), end})
    letters = {start: "s", min(max(stop, first_step, start), end): "d", min(max(first_step, start), end): "="}
    segments = [(left, right, letters.get(left, "=")) for left, right in itertools.pairwise(boundaries)]
    for mark in marks:
        letter = _EVENT_PHASES.get(mark.kind)
        if letter is not None and mark.end is not None:
            segments = _overlay(segments, mark.t, min(mark.end, end), letter)
    return segments


def _overlay(segments: list[PhaseSegment], start: float, end: float, letter: str) -> list[PhaseSegment]:
    """Return ``segments`` with one more laid over them; events come in order, so it overlaps only the last ones."""
    first_overlapped = len(segments)
    while first_overlapped and segments[first_overlapped - 1][1] > start:
        first_overlapped -= 1
    result, overlapped = segments[:first_overlapped], segments[first_overlapped:]
    for left, right, old_letter in overlapped:
        result += [(left, min(right, start), old_letter)] if left < start else []
    if end > start:
        result.append((start, end, letter))
    for left, right, old_letter in overlapped:
        result += [(max(left, end), right, old_letter)] if right > end else []
    return result


def _mean_utilization(summary: Summary, axis: Axis) -> list[float | None]:
    """Return the mean utilization over all GPUs by cell of the axis, None for cells without samples."""
    window_start = summary.window.start if summary.window.start is not None else axis.start
    total, counts = [0.0] * axis.num_cells, [0] * axis.num_cells
    cells_by_step: dict[tuple[float, int], list[range]] = {}  # equal for all GPUs, as a rule
    for gpu in summary.gpus:
        step_s, values = gpu.timeline.step_s, gpu.timeline.utilization
        cells = cells_by_step.get((step_s, len(values)))
        if cells is None:
            cells = [_cells_of_point(axis, window_start + i * step_s, step_s) for i in range(len(values))]
            cells_by_step[step_s, len(values)] = cells
        for value, point_cells in zip(values, cells, strict=True):
            if value is not None:
                for cell in point_cells:
                    total[cell] += value
                    counts[cell] += 1
    return [t / n if n else None for t, n in zip(total, counts, strict=True)]


def _cells_of_point(axis: Axis, start: float, step_s: float) -> range:
    """Return the cells of the axis that a point covers: at least one, also if it is shorter than a cell."""
    first = axis.cell(start)
    return range(first, max(first, axis.cell(start + step_s - 1e-6)) + 1)


def _event_style(mark: TimelineEvent) -> EventStyle:
    return _EVENT_STYLES.get(mark.kind, _OTHER_STYLE)


def _event_row(marks: Sequence[TimelineEvent], axis: Axis) -> Text:
    styles: dict[int, EventStyle] = {}
    for mark in marks:
        cell, event_style = axis.cell(mark.t), _event_style(mark)
        if cell not in styles or event_style.priority < styles[cell].priority:
            styles[cell] = event_style
    text = Text()
    for cell in range(max(styles) + 1):
        text.append(styles[cell].sign if cell in styles else " ", style=styles[cell].style if cell in styles else "")
    return text


_TICK_INTERVALS_S = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
    172800,
    604800,
)
_MIN_TICK_CELLS = 12


def _time_axis(axis: Axis) -> str:
    """Return a row of elapsed times at round numbers."""
    duration_s = axis.end - axis.start
    min_interval_s = duration_s * _MIN_TICK_CELLS / axis.num_cells
    interval_s = (
        next((s for s in _TICK_INTERVALS_S if s >= min_interval_s), None) or -(-int(min_interval_s) // 604800) * 604800
    )
    cells = [" "] * axis.num_cells
    for n in range(int(duration_s / interval_s) + 1):
        label = format_elapsed(n * interval_s)
        cell = axis.cell(axis.start + n * interval_s)
        if cell + len(label) < axis.num_cells:
            cells[cell : cell + len(label)] = label
    return "".join(cells)


def format_elapsed(seconds: float) -> str:
    """Format an elapsed time without zero units: ``0``, ``45s``, ``30m``, ``1h30m``, ``2d``, ``1d12h``."""
    s, parts = round(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if s >= size:
            parts.append(f"{s // size}{unit}")
            s %= size
    return "".join(parts[:2]) or "0"


def _legend(phases: Text | None) -> list[Text]:
    present = [] if phases is None else [sign for sign in _PHASES if sign in phases.plain]
    return [Text.assemble((sign, _PHASES[sign][1]), f" {_PHASES[sign][0]}") for sign in present]


def _event_counts(marks: Sequence[TimelineEvent]) -> list[Text]:
    counts = collections.Counter(_event_style(m) for m in marks)
    kinds = sorted(counts, key=lambda kind: kind.priority)
    labels = [(k, f"{counts[k]:,} {k.label}{'s' * (counts[k] != 1)}") for k in kinds]
    return [Text.assemble((kind.sign, kind.style), f" {text}") for kind, text in labels]


def _wrap_items(items: Sequence[Text], width: int) -> list[Text]:
    """Join items into lines of at most ``width`` cells without breaking an item."""
    lines: list[Text] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] = lines[-1] + Text("   ") + item
        else:
            lines.append(item)
    return lines


def _event_lines(marks: Sequence[TimelineEvent], axis: Axis, show_all: bool) -> list[Text]:
    listed = [m for m in marks if _event_style(m).is_listed]
    visible = listed if show_all else listed[-_MAX_LISTED:]
    lines = [
        Text(f"{format_elapsed(m.t - axis.start):>7}  {_format_event(m)}", style=_event_style(m).style) for m in visible
    ]
    if len(visible) < len(listed):
        lines.insert(0, Text(f"{len(listed) - len(visible):,} earlier events (--all shows them)"))
    return lines


def _format_event(mark: TimelineEvent) -> str:
    label = _EVENT_STYLES[mark.kind].label if mark.kind in _EVENT_STYLES else mark.kind.replace("_", " ")
    if not mark.text or mark.text.lower().startswith(label.lower()):
        return mark.text or label
    return f"{label}: {mark.text}"

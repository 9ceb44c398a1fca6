"""Notes as text, with a sign for their severity and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clustertrain.report.gpu_table import short_uuid
from clustertrain.telemetry.report_schema import Note

SIGNS = {"critical": ("!!", "bold red"), "warning": ("! ", "bold yellow"), "info": ("i ", "bold cyan")}
_MOST_ALIKE = 3  # notes of one kind that are spelt out; the rest is counted
_MARGIN = (0, 0, 0, 3)


def render(notes: Sequence[Note], every: bool = False) -> list[RenderableType]:
    """Notes of one kind stand together; past a few of them only their number is told."""
    kinds: dict[tuple[str, str], list[Note]] = {}
    for note in notes:
        kinds.setdefault((note.severity, note.code), []).append(note)
    parts: list[RenderableType] = [Text("Notes", style="bold")]
    for alike in kinds.values():
        shown = alike if every else alike[:_MOST_ALIKE]
        parts += [line(note) for note in shown]
        if len(alike) > len(shown):
            rest = f"and {len(alike) - len(shown):,} more like these (--all shows them, --json has them)"
            parts.append(Padding(rest, _MARGIN))
        fixes = list(dict.fromkeys(n.fix for n in shown if n.fix))
        parts += [Padding(Text(f"fix: {fix}"), _MARGIN) for fix in fixes]
    return parts


def line(note: Note) -> RenderableType:
    sign, style = SIGNS[note.severity]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=2)
    grid.add_column(overflow="fold")
    grid.add_row(Text(sign, style=style), Text(note.text + about(note)))
    return grid


def about(note: Note) -> str:
    """`` [rank 3, GPU-5b1c9f0e]``, so far as the words do not say it."""
    words = unsaid(note, short_uuid)
    return f" [{', '.join(words)}]" if words else ""


def unsaid(note: Note, shown: Callable[[str], str] = str) -> list[str]:
    """The rank and the UUID (as ``shown``) of what the note is about, so far as its words do not say it."""
    words = []
    if note.rank is not None and not re.search(rf"\brank {note.rank}\b", note.text, re.IGNORECASE):
        words.append(f"rank {note.rank}")
    if note.uuid is not None and note.uuid not in note.text:
        words.append(shown(note.uuid))
    return words

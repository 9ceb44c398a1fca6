"""The run's rows as they are written, each step once, from any step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertrain import reading
from clustertrain.run import metrics, metrics_file
from clustertrain.run.run_dir import RunDir

Row = dict[str, Any]
CHUNK = 1 << 20
MAX_LINE_BYTES = 1 << 26  # bytes that are held in wait for the end of a line
MAX_ROWS = 1000  # rows at a time: so many are repeated at most, where a process is killed


class RowFollower:
    """Rows of all attempts, and of all stretches of one that went back, in their order, with ``attempt`` in each.

    Steps only rise: a step that a later attempt ran again is not given twice. Where the later attempt's rows are there
    already, the step counts as that one ran it, as in :func:`clustertrain.run.metrics.load_rows`. A row whose
    evaluation was
    cut short is held back until it is told once more, or a later step follows: W&B takes nothing of a step that is
    past. Where the run is over, :meth:`take_pending` gives it.

    Args:
        after: the last step that is not wanted any more.
    """

    def __init__(self, run: RunDir, after: int = -1) -> None:
        self._run = run
        self.last_step = after
        self._file: tuple[int, Path] | None = None  # of which attempt, and which of its files
        self._offset = 0  # byte of that file up to which it is read
        self._pending_row: Row | None = None

    def read(self, max_rows: int = MAX_ROWS) -> list[Row]:
        """The next rows; empty where nothing new has been written."""
        rows: list[Row] = []
        files = [(a.n, path) for a in self._run.attempts() for path in self._run.metrics_files(a.n)]
        while files and len(rows) < max_rows:
            if self._file is None:
                self._file = files[0]
            later_files = files[files.index(self._file) + 1 :]
            previous_offset = self._offset
            rows += self._read_chunk(*self._file, _first_rerun_step(later_files), max_rows - len(rows))
            if self._offset == previous_offset:
                if not later_files:
                    break
                self._file, self._offset = later_files[0], 0
        return rows

    def take_pending(self) -> list[Row]:
        """The row that is held back, where nobody will tell it once more."""
        rows, self._pending_row = [self._pending_row] if self._pending_row is not None else [], None
        return rows

    def _read_chunk(self, attempt: int, path: Path, end_step: int | None, max_rows: int) -> list[Row]:
        """Of one chunk of whole lines; half a line, which is still being written, waits."""
        try:
            with reading.open_regular(path) as f:
                f.seek(self._offset)
                block = f.read(CHUNK)
                while block and b"\n" not in block and len(block) < MAX_LINE_BYTES and (more := f.read(CHUNK)):
                    block += more
        except FileNotFoundError:
            return []
        rows: list[Row] = []
        for line in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
            if len(rows) == max_rows:
                break
            self._offset += len(line)
            row = _parse_row(line)
            if row is not None and row["step"] > self.last_step and (end_step is None or row["step"] < end_step):
                rows += self._release({**row, "attempt": attempt})
        return rows

    def _release(self, row: Row) -> list[Row]:
        """What may be given now that ``row`` is there."""
        pending, self._pending_row = self._pending_row, None
        rows = [pending] if pending is not None and pending["step"] < row["step"] else []
        if metrics.is_cut_short(row):
            self._pending_row = row
        else:
            rows.append(row)
        self.last_step = rows[-1]["step"] if rows else self.last_step
        return rows


def _first_rerun_step(later_files: list[tuple[int, Path]]) -> int | None:
    """The first step that was run anew later, as far as it is on record."""
    first_steps = [
        row[0]["step"] for _, path in later_files if (row := metrics_file.read_first(path, metrics_file.WINDOW_BYTES))
    ]
    return min(first_steps, default=None)


def _parse_row(line: bytes) -> Row | None:
    try:
        row = reading.parse_json(line)
    except ValueError:  # torn by a kill
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def scalars(row: Row) -> dict[str, float]:
    """What of a row is worth a curve: numbers, but for the step, the time and the running totals."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, (int, float)) and name not in ("step", "t", "attempt") and not name.startswith("sum_")
    }

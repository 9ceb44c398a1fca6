"""A reader that follows a run's metric rows as they are written, each step once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertrain import reading
from clustertrain.run import metrics, metrics_file
from clustertrain.run.run_dir import RunDir

Row = dict[str, Any]
CHUNK = 1 << 20
MAX_LINE_BYTES = 1 << 26  # buffered while waiting for the end of a line
MAX_ROWS = 1000  # per read; a killed process repeats at most this many


class RowFollower:
    """Reader of the rows of all attempts, and of all segments of an attempt that rolled back, in order.

    Each row gets the key ``attempt``. Steps only increase: a step that a later attempt repeats is not returned again.
    If the later attempt's rows already exist, its values are used, as in :func:`clustertrain.run.metrics.load_rows`. A
    row whose evaluation was interrupted is held back until it is repeated or a later step follows, because W&B accepts
    no values for past steps. After the end of the run, :meth:`take_pending` returns it.

    Args:
        after: return only rows of later steps.
    """

    def __init__(self, run: RunDir, after: int = -1) -> None:
        self._run = run
        self.last_step = after
        self._file: tuple[int, Path] | None = None  # (attempt, path)
        self._offset = 0  # bytes of the file that have been read
        self._pending_row: Row | None = None

    def read(self, max_rows: int = MAX_ROWS) -> list[Row]:
        """Return the next rows, empty if nothing new has been written."""
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
        """Return the row that is held back, if any; call it once no attempt can repeat that row."""
        rows, self._pending_row = [self._pending_row] if self._pending_row is not None else [], None
        return rows

    def _read_chunk(self, attempt: int, path: Path, end_step: int | None, max_rows: int) -> list[Row]:
        """Return the rows in the next chunk of complete lines; an unfinished last line is read next time."""
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
        """Return the rows that can be released after ``row`` was read."""
        pending, self._pending_row = self._pending_row, None
        rows = [pending] if pending is not None and pending["step"] < row["step"] else []
        if metrics.is_cut_short(row):
            self._pending_row = row
        else:
            rows.append(row)
        self.last_step = rows[-1]["step"] if rows else self.last_step
        return rows


def _first_rerun_step(later_files: list[tuple[int, Path]]) -> int | None:
    """Return the first step that a later file repeats, or None if there is none yet."""
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
    """Return the numbers of a row, without step, time, attempt and running totals."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, (int, float)) and name not in ("step", "t", "attempt") and not name.startswith("sum_")
    }

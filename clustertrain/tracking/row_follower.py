"""The run's rows as they are written, each step once, from any step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertrain import reading
from clustertrain.run import metrics, metrics_file
from clustertrain.run.run_dir import RunDir

Row = dict[str, Any]
CHUNK = 1 << 20
LONGEST = 1 << 26  # bytes that are held in wait for the end of a line
MOST = 1000  # rows at a time: so many are repeated at most, where a process is killed


class Follower:
    """Rows of all attempts, and of all stretches of one that went back, in their order, with ``attempt`` in each.

    Steps only rise: a step that a later attempt ran again is not given twice. Where the later attempt's rows are there
    already, the step counts as that one ran it, as in :func:`clustertrain.run.metrics.read`. A row whose evaluation was
    cut short is held back until it is told once more, or a later step follows: W&B takes nothing of a step that is
    past. Where the run is over, :meth:`rest` gives it.

    Args:
        after: the last step that is not wanted any more.
    """

    def __init__(self, run: RunDir, after: int = -1) -> None:
        self._run = run
        self.last = after
        self._file: tuple[int, Path] | None = None  # of which attempt, and which of its files
        self._at = 0  # byte of that file up to which it is read
        self._held: Row | None = None

    def read(self, most: int = MOST) -> list[Row]:
        """The next rows; empty where nothing new has been written."""
        found: list[Row] = []
        files = [(a.n, path) for a in self._run.attempts() for path in self._run.metrics_files(a.n)]
        while files and len(found) < most:
            if self._file is None:
                self._file = files[0]
            later = files[files.index(self._file) + 1 :]
            before = self._at
            found += self._more(*self._file, _cut(later), most - len(found))
            if self._at == before:
                if not later:
                    break
                self._file, self._at = later[0], 0
        return found

    def rest(self) -> list[Row]:
        """The row that is held back, where nobody will tell it once more."""
        found, self._held = [self._held] if self._held is not None else [], None
        return found

    def _more(self, attempt: int, path: Path, cut: int | None, most: int) -> list[Row]:
        """Of one chunk of whole lines; half a line, which is still being written, waits."""
        try:
            with reading.opened(path) as f:
                f.seek(self._at)
                block = f.read(CHUNK)
                while block and b"\n" not in block and len(block) < LONGEST and (more := f.read(CHUNK)):
                    block += more
        except FileNotFoundError:
            return []
        found: list[Row] = []
        for line in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
            if len(found) == most:
                break
            self._at += len(line)
            row = _row(line)
            if row is not None and row["step"] > self.last and (cut is None or row["step"] < cut):
                found += self._given({**row, "attempt": attempt})
        return found

    def _given(self, row: Row) -> list[Row]:
        """What may be given now that ``row`` is there."""
        held, self._held = self._held, None
        found = [held] if held is not None and held["step"] < row["step"] else []
        if metrics.is_cut_short(row):
            self._held = row
        else:
            found.append(row)
        self.last = found[-1]["step"] if found else self.last
        return found


def _cut(later: list[tuple[int, Path]]) -> int | None:
    """The first step that was run anew later, as far as it is on record."""
    firsts = [row[0]["step"] for _, path in later if (row := metrics_file.first(path, metrics_file.WINDOW))]
    return min(firsts, default=None)


def _row(line: bytes) -> Row | None:
    try:
        row = reading.parse(line)
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

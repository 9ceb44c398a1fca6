"""The checkpoints that a command saves: the one that an attempt resumes from, and the new ones, which are progress.

The batch process looks for them, so all nodes get the same answer.
"""

from __future__ import annotations

import contextlib
import glob
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from clustertrain import settings
from clustertrain.config.command_options import fill
from clustertrain.config.job import RunSpec
from clustertrain.rank_hooks.clustertrain_hooks import checkpoints
from clustertrain.rank_hooks.clustertrain_hooks.checkpoint_checks import find_problem
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank
from clustertrain.run import event_types, events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import AttemptDir, RunDir

INTERVAL_S = 30.0  # between two looks: what a killed batch process has not seen, the next attempt finds
BEGIN_PATIENCE_S = 120.0  # for large checkpoints on a slow filesystem
END_PATIENCE_S = 5.0  # a requeue must not come too late


class SavedCheckpoint(NamedTuple):
    """A file or folder that matches ``job.checkpoints``."""

    path: str
    modified: float
    """Time of the newest change (UTC epoch s); for a folder, also of the files in it."""


class ProgramCheckpoints:
    """The checkpoints of a command in one attempt.

    A thread reads the files: a filesystem that hangs must not keep the batch process from its signals.
    """

    def __init__(self, run: RunDir, attempt: AttemptDir, spec: RunSpec) -> None:
        self._run, self._attempt = run, attempt
        self._pattern = build_pattern(spec, run.path)
        self._ranks = spec.job.nodes * spec.job.gpus
        self._is_command = spec.script is not None and bool(spec.script.command)
        self._log = EventLog(attempt.events_path("checkpoints")) if self._is_command and self._pattern else None
        self._newest = 0.0
        self._chosen = ""
        self._is_begun, self._is_ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="checkpoints", daemon=True)

    def begin(self) -> str:
        """Return the newest whole checkpoint that the run has saved, empty without one; watch for newer ones."""
        if not self._is_command:
            return ""
        self._thread.start()
        if not self._is_begun.wait(BEGIN_PATIENCE_S):
            _print(f"no checkpoint found within {BEGIN_PATIENCE_S:.0f} s: the command starts without one")
        return self._chosen

    def end(self) -> None:
        """Look for new checkpoints a last time, after the ranks have ended."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(END_PATIENCE_S)

    def _watch(self) -> None:
        try:
            if self._log is None:
                self._chosen = _find_reported(self._run, self._attempt, self._ranks)
                return
            self._chosen = self._choose(self._log)
        except OSError as e:
            _print(f"no checkpoint found: {e}")
            return
        finally:
            self._is_begun.set()
        is_last = False
        while not is_last:
            is_last = self._is_ending.wait(INTERVAL_S)
            try:
                self._look(self._log)
            except OSError as e:
                _print(f"{self._pattern}: {e}")

    def _choose(self, log: EventLog) -> str:
        """Return the checkpoint to resume from, and record it with what was there before the run."""
        earlier = _find_first_look(self._run, self._attempt)
        found = list_matches(self._pattern)
        if earlier is None:  # what matches now, another run has saved
            self._newest = found[0].modified if found else 0.0
            log.write("program_checkpoint", path=None, modified=self._newest, is_new=False)
            return ""
        self._newest = earlier
        chosen = self._find_newer(found, report=_report_problem)
        path = chosen.path if chosen is not None else ""
        self._newest = chosen.modified if chosen is not None else earlier
        log.write("program_checkpoint", path=path or None, modified=self._newest, is_new=False)
        return path

    def _look(self, log: EventLog) -> None:
        newer = self._find_newer(list_matches(self._pattern))
        if newer is not None:
            self._newest = newer.modified
            log.write("program_checkpoint", path=newer.path, modified=newer.modified, is_new=True)

    def _find_newer(
        self, found: list[SavedCheckpoint], report: Callable[[str, str], None] | None = None
    ) -> SavedCheckpoint | None:
        """Return the newest whole checkpoint that is newer than the last one; None without one."""
        for checkpoint in found:
            if checkpoint.modified <= self._newest:
                return None
            problem = _find_problem(checkpoint.path, self._ranks)
            if not problem:
                return checkpoint
            if report is not None:
                report(checkpoint.path, problem)
        return None


def _find_problem(path: str, ranks: int) -> str:
    """Return why a checkpoint is not whole; empty if it is, or if nothing in it shows that it is not."""
    is_empty = Path(path).is_file() and not Path(path).stat().st_size
    return "it is empty" if is_empty else find_problem(path, ranks)


def build_pattern(spec: RunSpec, run_dir: Path) -> str:
    """Return ``job.checkpoints`` as an absolute pattern; empty if it is not set."""
    if not spec.job.checkpoints or spec.script is None:
        return ""
    pattern = fill(spec.job.checkpoints, {"run_dir": glob.escape(str(run_dir))})
    if pattern.startswith("~"):
        pattern = str(settings.expand_user_path(pattern, "job.checkpoints"))
    return str(Path(glob.escape(spec.script.cwd), pattern))


def list_matches(pattern: str) -> list[SavedCheckpoint]:
    """Return the files and folders that match, the newest first."""
    paths = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    found = [SavedCheckpoint(path, max(_list_times(Path(path)), default=0.0)) for path in paths]
    return sorted((c for c in found if c.modified), key=lambda c: (c.modified, c.path), reverse=True)


def _list_times(path: Path) -> Iterator[float]:
    """Yield the times of the newest changes of a file, or of a folder and what is in it; none if it cannot be read."""
    try:
        paths = [path, *(path.iterdir() if path.is_dir() else ())]
    except OSError:
        return
    for part in paths:
        with contextlib.suppress(OSError):
            yield part.stat().st_mtime


def _find_first_look(run: RunDir, attempt: AttemptDir) -> float | None:
    """Return the time of the newest match before the run's first attempt; None in that attempt."""
    for earlier in run.attempts():
        if earlier.n < attempt.n:
            look = next(events.select(events.for_attempt(earlier), event_types.ProgramCheckpoint), None)
            if look is not None:
                return look.modified or 0.0
    return None


def _find_reported(run: RunDir, attempt: AttemptDir, ranks: int) -> str:
    """Return the newest whole checkpoint that hooks have reported in an earlier attempt; empty without one."""
    rank = Rank(rank=0, world_size=ranks, attempt=attempt.n, run_dir=str(run.path), rank_dir="")
    return next((path for path in checkpoints.list_saved(rank) if not find_problem(path, ranks)), "")


def _report_problem(path: str, problem: str) -> None:
    _print(f"skipping checkpoint {path}: {problem}")


def _print(message: str) -> None:
    print(f"clustertrain: {message}", file=sys.stderr, flush=True)

"""Steps, checkpoints and phases of this rank, as the frameworks' hooks report them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from typing import Any, Callable

from . import checkpoints, heartbeat, scheduler_signal
from .guard import guarded
from .heartbeat import Heartbeat
from .rank import Rank, find_rank
from .records import Records

_COLUMNS = frozenset({"step", "t", "step_s", "sum_step_s", "data_wait_s", "sum_data_wait_s"})
_progress: Progress | None = None
# Of the loaders' waits before the first step: when the first one began, and their sum in seconds.
_first_wait: float | None = None
_early_wait_s = 0.0
_has_session = False


def get_progress() -> Progress | None:
    """Return the progress of this process, begun at the first call; None outside a run, and in children of a rank."""
    global _progress  # noqa: PLW0603
    if _has_session:
        return None
    if _progress is None:
        rank = find_rank(os.environ)
        if rank is None or multiprocessing.parent_process() is not None:
            return None
        _progress = Progress(rank, _first_wait)
        _progress.wait_for_data(_early_wait_s)
    return _progress if _progress.pid == os.getpid() else None


def leave_to_session() -> None:
    """Report nothing from now on: a session of clustertrain does so itself."""
    global _has_session  # noqa: PLW0603
    _has_session = True


def report_wait(begin: float) -> None:
    """Report a wait of the program for its loader, from ``begin`` (monotonic, s) until now."""
    global _first_wait, _early_wait_s  # noqa: PLW0603
    seconds = time.monotonic() - begin
    if _progress is None:
        _first_wait = begin if _first_wait is None else _first_wait
        _early_wait_s += seconds
    elif _progress.pid == os.getpid():
        _progress.wait_for_data(seconds)


class Progress:
    """The heartbeat of the rank, and rank 0's rows and events.

    A framework with a step count of its own (:attr:`framework`) replaces the count of optimizer steps.
    """

    def __init__(self, rank: Rank, began: float | None = None) -> None:
        """``began``: start of the first step (monotonic, s), if it is known."""
        self.rank = rank
        self.pid = os.getpid()
        self.framework = ""
        self.step = 0
        self.data_wait_s = 0.0
        self.wrote_row = False
        self._heartbeat = Heartbeat(rank.rank_dir, rank.rank)
        self._records = Records(rank) if rank.rank == 0 else None
        self._is_closed = self._is_finished = False
        self._began = began
        self._row: dict[str, Any] = {}
        self._next_values: dict[str, float] = {}
        totals = self._records.totals if self._records is not None else {}
        self._sum_step_s = float(totals.get("sum_step_s", 0.0))
        self._sum_data_wait_s = float(totals.get("sum_data_wait_s", 0.0))
        atexit.register(guarded(self._flush_at_exit))  # before that of the records, which was registered earlier
        self._excluded_s = 0.0
        self._committed_step: int | None = None
        self._restored: tuple[str, float] | None = None
        self._watched: list[Callable[[], bool]] = []

    def begin(self) -> None:
        """Report that the first step begins after ``self.step`` steps."""
        self._is_closed = False
        if self._is_finished:  # an earlier training of this process
            self._is_finished = False
            self._write_state()
        self._began, self._excluded_s, self.data_wait_s = time.monotonic(), 0.0, 0.0
        beat = self._heartbeat
        beat.step, beat.phase, beat.step_began = self.step, heartbeat.TRAIN, self._began
        beat.write()

    def wait_for_data(self, seconds: float) -> None:
        """Add the time that the program waited for its loader."""
        self.data_wait_s += seconds

    def end_step(self, step: int) -> None:
        """Report that ``step`` optimizer steps are done."""
        now = time.monotonic()
        self._poll_watched()
        self._flush_row()
        step_s = None if self._began is None else max(0.0, now - self._began - self._excluded_s)
        if not self.wrote_row:
            begin = time.time() - (step_s or 0.0)
            self._write_event("first_step", t_begin=begin, step=step)
            self.wrote_row = True
        self.step, self._began, self._excluded_s = step, now, 0.0
        self._row = {"step": step, "t": time.time(), **self._next_values}
        self._next_values = {}
        if step_s is not None:
            self._sum_step_s += step_s
            self._row.update(step_s=step_s, sum_step_s=round(self._sum_step_s, 6))
        if self.data_wait_s:
            self._sum_data_wait_s += self.data_wait_s
            self._row.update(data_wait_s=self.data_wait_s, sum_data_wait_s=round(self._sum_data_wait_s, 6))
        beat = self._heartbeat
        beat.step, beat.phase, beat.step_began = step, heartbeat.TRAIN, now
        beat.data_wait_s += self.data_wait_s
        self.data_wait_s = 0.0
        beat.write()

    def log(self, values: dict[str, Any]) -> None:
        """Add the numbers in ``values`` to the row of the newest step, or to another one if that is written."""
        self._row = self._row or {"step": self.step, "t": time.time()}
        self._row.update(_select_numbers(values))

    def log_next(self, values: dict[str, Any]) -> None:
        """Add the numbers in ``values`` to the row of the step that is under way."""
        self._next_values.update(_select_numbers(values))

    def exclude(self, seconds: float) -> None:
        """Leave ``seconds`` out of the time of the current step: a checkpoint or an evaluation."""
        self._excluded_s += seconds

    def enter(self, phase: int) -> None:
        if not self._is_closed:
            self._heartbeat.phase = phase
            self._heartbeat.write()

    def record_evaluation(self, seconds: float) -> None:
        self.exclude(seconds)
        self.data_wait_s = 0.0  # of the evaluation's loader
        self._write_event("evaluation", t_begin=time.time() - seconds, step=self.step, eval_s=seconds)
        self.enter(heartbeat.TRAIN)

    def record_checkpoint(self, path: str, stall_s: float, reason: str = "interval", source: str = "") -> None:
        """Report that the program has saved a whole checkpoint of the newest step.

        ``source``: which training of the program saved it, as ``checkpoints.begin_training`` names it.
        """
        self.exclude(stall_s)
        self._write_checkpoint(path, self.step, time.monotonic() - stall_s, stall_s, stall_s, reason, source)
        self.enter(heartbeat.TRAIN)

    def record_late_checkpoint(self, path: str, step: int, began: float, *, stall_s: float, save_s: float) -> None:
        """Report that a save in the background, which began after ``step`` steps at ``began`` (monotonic, s), is whole.

        ``stall_s``: how long the program waited for it.
        """
        self._write_checkpoint(path, step, began, stall_s, save_s, "interval", "")

    def _write_checkpoint(
        self, path: str, step: int, began: float, stall_s: float, save_s: float, reason: str, source: str
    ) -> None:
        self._committed_step = step
        self._write_event(
            "checkpoint", t_begin=time.time() - (time.monotonic() - began), step=step, stall_s=stall_s, save_s=save_s,
            reason=reason, path=os.path.abspath(path), source=source,
        )  # fmt: skip
        self._write_state()

    def record_overwriting(self, path: str) -> None:
        """Report that a save into the folder of an earlier checkpoint begins: until its end, neither is whole."""
        self._write_event("checkpoint_overwriting", step=self.step, path=path)

    def watch(self, report_if_done: Callable[[], bool]) -> None:
        """Call ``report_if_done`` at the end of each step, and at the exit, until it returns True."""
        self._watched.append(report_if_done)

    def _poll_watched(self) -> None:
        self._watched = [report_if_done for report_if_done in self._watched if not report_if_done()]

    def record_restore(self, step: int, path: str, seconds: float) -> None:
        """Report that the program continues at ``step`` with the state in ``path``."""
        self.step = step
        self._write_event("restored", t_begin=time.time() - seconds, step=step, restore_s=seconds, path=path)

    def note_restore(self, path: str, seconds: float) -> None:
        """Note that the program has loaded ``path``, whose step is not known before the next step."""
        self._restored = (os.path.abspath(path) if path else "", seconds)

    def begin_at(self, step: int) -> None:
        """Report the steps that an earlier attempt had done: those of the checkpoint, or ``step``.

        ``step``: what the state of the optimizer shows, which not every optimizer counts.
        """
        path, seconds = self._restored or ("", 0.0)
        if path:
            step = checkpoints.find_step(self.rank, path) or step
        if step > 0:
            self.record_restore(step, path, seconds)

    def record_stop(self, step: int) -> None:
        self._write_event("stop_agreed", step=step, save=True)

    def finish(self) -> None:
        """Report that the training has done all its steps, if exit code 0 will then say that the program is done.

        A program with a handler may exit with code 0 because it was stopped.
        """
        self._is_finished = not scheduler_signal.has_stop_handler(os.environ)
        self.close()

    def close(self) -> None:
        """Report that the training of this process is over."""
        self._flush_row()
        if self._records is not None:
            self._records.flush()
        self._write_state()
        self._is_closed = True
        self._heartbeat.close()

    def _flush_at_exit(self) -> None:
        self._poll_watched()
        self._flush_row()

    def _flush_row(self) -> None:
        if self._row and self._records is not None:
            self._records.add_row(self._row)
        self._row = {}

    def _write_event(self, event: str, **fields: Any) -> None:
        if self._records is not None:
            if event != "first_step":
                self._flush_row()
            self._records.write_event(event, **fields)

    def _write_state(self) -> None:
        state = {"step": self.step, "committed_step": self._committed_step, "finished": self._is_finished}
        self.rank.write(f"progress-{self.rank.rank}.json", state)


def _select_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in ``values``, without those whose names are columns of every row."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in _COLUMNS
    }

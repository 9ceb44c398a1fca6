"""A program's own loop that stops and resumes: ``job = attach(save=…, load=…)``, ``for step in job.steps(total)``."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable

from . import checkpoints, heartbeat
from .guard import guarded
from .progress import Progress, get_progress
from .rank import Rank, read_json, write_json
from .stop_step import EXIT_STOPPED, StopStep
from .torch_data import guard_workers

FRAMEWORK = "attach"
_FOLDER, _STEP_FOLDER = "program-checkpoints", r"step-(\d+)"
_MARKER = "COMPLETE.json"
_SAVE_PATIENCE_S = 1800.0  # for the slowest rank's save
_POLL_S = 0.05


def attach(
    *, save: Callable[[str], object], load: Callable[[str], object], every: int = 0, keep: int = 2, folder: str = ""
) -> Job:
    """Return the job of this process, which saves, stops and resumes a loop of the program's own.

    Outside a run it only counts steps, saves and resumes.

    Args:
        save: called on every rank with a folder, the same for all of them. Each rank writes files of its own there, or
            only rank 0 does; a collective such as ``torch.distributed.checkpoint.save`` is fine.
        load: called on every rank with the folder of the latest complete checkpoint, before the first step.
        every: steps between two checkpoints; 0: only when the job has to stop.
        keep: newest checkpoints to keep.
        folder: where checkpoints are written. Empty: ``program-checkpoints`` in the run folder; outside a run, in the
            current folder.

    Raises:
        ValueError: ``every`` is negative, or ``keep`` is less than 1.
    """
    if every < 0 or keep < 1:
        raise ValueError(f"attach: every = {every} must be 0 or more and keep = {keep} must be 1 or more")
    return Job(save, load, every, keep, folder)


class Job:
    """The loop of a program: :meth:`steps`, or :meth:`resume`, :meth:`end_step` and :meth:`finish` where it has others.

    Attributes:
        step: steps done, those of earlier attempts included.
        should_stop: whether all ranks have saved after this step in order to stop.
    """

    def __init__(
        self, save: Callable[[str], object], load: Callable[[str], object], every: int, keep: int, folder: str
    ) -> None:
        self.step = 0
        self.should_stop = False
        self._save, self._load, self._every, self._keep = save, load, every, keep
        self._progress = get_progress()
        self._rank = self._progress.rank if self._progress is not None else _rank_outside_run()
        self._stop = StopStep(self._rank)
        self._folder = os.path.abspath(folder or os.path.join(self._rank.run_dir, _FOLDER))
        self._training = checkpoints.begin_training(FRAMEWORK)
        self._saved_step = 0
        self._is_started = False
        if self._progress is not None:
            guarded(guard_workers)()

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left of ``total``, from 0 on; between two of them, save or stop.

        When the ranks have agreed to stop, every rank saves after the same step and ends with exit code 75, as
        ``SystemExit``: code after the loop runs only when all steps are done.

        Raises:
            RuntimeError: called twice.
        """
        self.resume()
        while self.step < total:
            yield self.step
            self.end_step()
            if self.should_stop:
                sys.exit(EXIT_STOPPED)
        self.finish()

    def resume(self) -> int:
        """Load the latest complete checkpoint, if there is one, before the loop; return the steps that are done.

        Raises:
            RuntimeError: called twice, or after :meth:`steps`.
        """
        if self._is_started:
            raise RuntimeError("this job has started before: a process has one loop of steps")
        self._is_started = True
        progress = self._progress
        if progress is not None:
            progress.framework = FRAMEWORK
        self._load_newest()
        self._saved_step = self.step
        if progress is not None:
            progress.step = self.step
            self._stop.offer(FRAMEWORK)
            progress.begin()
        return self.step

    def end_step(self) -> None:
        """Count a step as done, on every rank, and save after it if one is due.

        When the ranks have agreed to stop after it, they save and :attr:`should_stop` is True: leave the loop and the
        program then. A loop that goes on ends at its next step, with exit code 75.
        """
        if self.should_stop:
            sys.exit(EXIT_STOPPED)
        self.step += 1
        progress = self._progress
        if progress is not None:
            progress.end_step(self.step)
            if self._stop.is_reached(self.step):
                progress.record_stop(self.step)
                self._write(progress, "stop")
                progress.close()
                self.should_stop = True
                return
        if self._every and self.step % self._every == 0:
            self._write(progress, "interval")

    def finish(self) -> None:
        """Say that the loop is over, and save once more with ``every``. Call it after the last step."""
        if self.should_stop:
            return
        if self._every and self._saved_step < self.step:
            self._write(self._progress, "end")
        if self._progress is not None:
            self._stop.withdraw()
            self._progress.finish()

    def log(self, **values: float) -> None:
        """Report numbers of the current step, such as ``loss=…``: they are in the run's metrics and reports.

        A tensor on a GPU would have to be waited for: pass ``loss.item()`` where you print it anyway.
        """
        if self._progress is not None:
            self._progress.log_next(values)

    def _load_newest(self) -> None:
        began = time.monotonic()
        # COMPLETE.json says that they are whole; what is in them is the program's.
        path = checkpoints.choose(self._rank, self._training, self._list_whole, lambda _: "")
        if path is None:
            return
        self._load(path)
        self.step = int(os.path.basename(path).rpartition("-")[2])
        if self._progress is not None:
            self._progress.record_restore(self.step, path, time.monotonic() - began)

    def _list_whole(self) -> list[str]:
        folders = checkpoints.list_numbered(self._folder, _STEP_FOLDER)
        return [folder for folder in folders if os.path.exists(os.path.join(folder, _MARKER))]

    def _write(self, progress: Progress | None, reason: str) -> None:
        """Save a checkpoint, which counts once every rank has written its part."""
        began = time.monotonic()
        path = os.path.join(self._folder, f"step-{self.step}")
        if progress is not None:
            progress.enter(heartbeat.CHECKPOINT)
        os.makedirs(path, exist_ok=True)
        self._save(path)
        self._saved_step = self.step
        rank = self._rank
        write_json(os.path.join(path, f"saved-{rank.rank}.json"), {"step": self.step, "attempt": rank.attempt})
        if rank.rank == 0:
            self._complete(path)
            for old in self._list_whole()[self._keep :]:
                shutil.rmtree(old, ignore_errors=True)
        if progress is not None:
            progress.record_checkpoint(path, time.monotonic() - began, reason, self._training)

    def _complete(self, path: str) -> None:
        """Mark the checkpoint as whole after the other ranks' parts are there."""
        missing: set[int] = set(range(self._rank.world_size))
        give_up_at = time.monotonic() + _SAVE_PATIENCE_S
        while missing:
            os.listdir(path)  # an NFS client then asks its server for new files
            missing = {rank for rank in missing if not self._is_saved(path, rank)}
            if missing and time.monotonic() > give_up_at:
                raise TimeoutError(f"{path}: ranks {sorted(missing)} have not saved within {_SAVE_PATIENCE_S:.0f} s")
            if missing:
                time.sleep(_POLL_S)
        write_json(os.path.join(path, _MARKER), {"step": self.step, "ranks": self._rank.world_size})

    def _is_saved(self, path: str, rank: int) -> bool:
        """Return whether ``rank`` has saved in this attempt; an earlier one may have ended within the same save."""
        record: Any = read_json(os.path.join(path, f"saved-{rank}.json"))
        return bool(record) and record["attempt"] == self._rank.attempt


def _rank_outside_run() -> Rank:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return Rank(rank=rank, world_size=world_size, attempt=0, run_dir=os.getcwd(), rank_dir=os.getcwd())

"""What ``clustertrain requeue`` does: ask a running attempt to start again, or continue a run that has ended.

Two commands may do so at the same moment, on two machines. Each request is a file that one of them alone can make:
whoever comes second reads what the first one asked for (docs/decisions/0033).
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from clustertrain import clock, fsio, reading
from clustertrain.errors import ClusterTrainError
from clustertrain.run import events, json_files
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.scheduler.backend import Backend, Submission

ANSWER_S = 30.0  # for a running attempt, which looks once a second
SUBMITTING_S = 600.0  # after which a command on another machine counts as dead where it has submitted nothing
WRITING_S = 2.0
_KINDS = {"options": dict, "by": str, "host": str, "pid": float, "created": float, "t": float, "job_id": str}


def ask(run: RunDir, attempt: AttemptDir, options: Mapping[str, str]) -> None:
    """Ask a running attempt to stop at a checkpoint and start again with these options of sbatch; returns once it does.

    Raises:
        ClusterTrainError: another request is pending, the attempt is ending, or it does not answer.
    """
    if not fsio.create_json(attempt.requeue_asked, {"options": dict(options), **_me()}):
        pending = _written(attempt.requeue_asked)
        if "options" not in pending:
            raise ClusterTrainError(
                f"attempt {attempt.n} of {run.id} is ending by itself: too late to ask it for anything",
                fix=f"see `clustertrain status {run.id}`, and ask again once the run has ended or runs again",
            )
        if pending["options"] != dict(options):
            raise ClusterTrainError(
                f"{run.id} is being requeued already, {_in_words(pending['options'])}, asked for by "
                f"{pending.get('by', 'somebody')}: this request was ignored",
                fix=f"when the next attempt runs: clustertrain requeue {run.id}{_as_typed(options)}",
            )
    answers: list[events.Event] = []

    def answered() -> bool:
        answers[:] = events.named(events.of_attempt(attempt), "requeue_answered")
        return bool(answers)

    if not clock.wait_until(answered, ANSWER_S, 0.5):
        raise ClusterTrainError(
            f"attempt {attempt.n} of {run.id} has not answered for {ANSWER_S:g} s. The request remains in place, and "
            "takes effect if the attempt's batch process is still running",
            fix=f"see `clustertrain status {run.id}`",
        )
    if not answers[-1].get("taken"):
        raise ClusterTrainError(f"{run.id} is not started again: {answers[-1].get('why')}")
    if run.cancelled.exists():
        raise ClusterTrainError(f"{run.id} was cancelled meanwhile", fix=after_cancel(run))


def after_cancel(run: RunDir) -> str:
    return f"clustertrain wait {run.id}; clustertrain requeue {run.id}"


class Continuation:
    """A continuation of an ended run. Made before anybody looks at whether the run has ended: a command that has
    continued it since then is found by :meth:`claim`."""

    def __init__(self, run: RunDir) -> None:
        """Raises ClusterTrainError: another command is at it."""
        self._run = run
        self._folder = run.path / "continued"
        names = [p.stem for p in self._folder.iterdir()] if self._folder.is_dir() else []
        numbers = [int(name) for name in names if reading.is_count(name)]
        newest = max(numbers, default=0)
        self._path = self._folder / f"{newest + 1}.json"
        if newest:
            self._refuse(self._folder / f"{newest}.json")

    def _refuse(self, path: Path, *, submitted_too: bool = False) -> None:
        other = _written(path) if submitted_too else json_files.read(path, _KINDS).value
        job_id, by = other.get("job_id"), other.get("by", "somebody")
        if job_id and submitted_too:
            raise ClusterTrainError(f"{self._run.id} was continued just now, by {by}, as job {job_id}")
        if submitted_too or (not job_id and _is_at_work(other)):
            raise ClusterTrainError(
                f"{self._run.id} is being continued by another command: {by}, process {other.get('pid')} on "
                f"{other.get('host')}, is submitting it",
                fix=f"`clustertrain status {self._run.id}` shows its job in a moment",
            )

    def claim(self) -> None:
        """Raises ClusterTrainError: another command was faster."""
        fsio.claim_folder(self._folder)
        if not fsio.create_json(self._path, _me()):
            self._refuse(self._path, submitted_too=True)

    def submit(self, backend: Backend, options: Mapping[str, str]) -> str:
        """Submit the run again, whose cancel marker goes out of the way; returns the job. Raises as the backend."""
        cancelled, away = self._run.cancelled, self._run.path / f"cancelled-until-{clock.now():.0f}.json"
        with suppress(FileNotFoundError):
            cancelled.rename(away)
        try:
            return backend.submit(Submission(run=self._run, options=options))
        except BaseException:
            with suppress(FileNotFoundError):
                away.rename(cancelled)
            self._path.unlink(missing_ok=True)
            raise

    def submitted(self, job_id: str) -> None:
        """Once the run's events name the job."""
        fsio.write_json(self._path, {**_me(), "job_id": job_id})


def _me() -> dict[str, Any]:
    created = psutil.Process().create_time()
    return {
        "by": getpass.getuser(), "host": socket.gethostname(), "pid": os.getpid(), "created": created, "t": clock.now()
    }  # fmt: skip


def _is_at_work(other: Mapping[str, Any]) -> bool:
    """Whether the command that made a claim may still be submitting. On this machine its process tells."""
    if other.get("host") != socket.gethostname():
        return bool(clock.now() - other.get("t", 0.0) < SUBMITTING_S)
    try:
        return bool(abs(psutil.Process(max(1, int(other["pid"]))).create_time() - other["created"]) < 2.0)
    except (psutil.NoSuchProcess, KeyError):
        return False


def _written(path: Path) -> dict[str, Any]:
    """What somebody has just put into ``path``, which without hard links is empty for a moment."""
    found: dict[str, Any] = {}

    def read() -> bool:
        found.update(json_files.read(path, _KINDS).value)
        return bool(found)

    clock.wait_until(read, WRITING_S, 0.1)
    return found


def _in_words(options: Mapping[str, str]) -> str:
    return f"with{_as_typed(options)}" if options else "without options"


def _as_typed(options: Mapping[str, str]) -> str:
    return "".join(f" --{name} {value}" for name, value in options.items())

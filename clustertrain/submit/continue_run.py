"""``clustertrain requeue``: ask a running attempt to restart, or continue a run that has ended.

Two commands may run at the same time on two machines. Each request is a file that only one of them can create; the
other command reads the file (docs/decisions/0033).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from clustertrain import clock, fsio, reading, settings
from clustertrain.errors import ClusterTrainError, SchedulerError
from clustertrain.run import event_types, events, json_files
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.scheduler.backend import Backend, Submission

ANSWER_TIMEOUT_S = 30.0  # for a running attempt, which polls once a second
SUBMIT_TIMEOUT_S = 600.0  # a command on another machine that has submitted nothing by then counts as dead
WRITE_TIMEOUT_S = 2.0
_FIELD_TYPES = {"options": dict, "user": str, "host": str, "pid": float, "created": float, "t": float, "job_id": str}


def request_requeue(run: RunDir, attempt: AttemptDir, options: Mapping[str, str]) -> None:
    """Ask a running attempt to stop at a checkpoint and restart with these sbatch options; return once it agrees.

    Raises:
        ClusterTrainError: another request is pending, the attempt is ending, or it does not answer.
    """
    if not fsio.create_json(attempt.requeue_request, {"options": dict(options), **_build_claim()}):
        pending = _read_new_json(attempt.requeue_request)
        if "options" not in pending:
            raise ClusterTrainError(
                f"attempt {attempt.n} of {run.id} is already ending, too late for a request",
                fix=f"see `clustertrain status {run.id}`, and try again after the run has ended or restarted",
            )
        if pending["options"] != dict(options):
            raise ClusterTrainError(
                f"{run.id} is already being requeued {_describe_options(pending['options'])}, requested by "
                f"{pending.get('user', 'another user')}: this request was ignored",
                fix=f"when the next attempt runs: clustertrain requeue {run.id}{_format_options(options)}",
            )
    answers: list[event_types.RequeueAnswered] = []

    def has_answer() -> bool:
        answers[:] = events.select(events.for_attempt(attempt), event_types.RequeueAnswered)
        return bool(answers)

    if not clock.wait_until(has_answer, ANSWER_TIMEOUT_S, 0.5):
        raise ClusterTrainError(
            f"attempt {attempt.n} of {run.id} has not answered for {ANSWER_TIMEOUT_S:g} s. The request remains in"
            " place, and takes effect if the attempt's batch process is still running",
            fix=f"see `clustertrain status {run.id}`",
        )
    if not answers[-1].accepted:
        raise ClusterTrainError(f"{run.id} is not started again: {answers[-1].reason}")
    if run.cancel_marker.exists():
        raise ClusterTrainError(f"{run.id} was cancelled after the request", fix=suggest_after_cancel(run))


def suggest_after_cancel(run: RunDir) -> str:
    return f"clustertrain wait {run.id}; clustertrain requeue {run.id}"


class Continuation:
    """A continuation of an ended run.

    Create it before checking that the run has ended: :meth:`claim` then detects whether another command has continued
    the run since.
    """

    def __init__(self, run: RunDir) -> None:
        """Raise ClusterTrainError if another command is continuing the run."""
        self._run = run
        self._folder = run.path / "continued"
        names = [p.stem for p in self._folder.iterdir()] if self._folder.is_dir() else []
        numbers = [int(name) for name in names if reading.is_unsigned_int(name)]
        newest = max(numbers, default=0)
        self._path = self._folder / f"{newest + 1}.json"
        if newest:
            self._check_claim(self._folder / f"{newest}.json")

    def _check_claim(self, path: Path, *, include_submitted: bool = False) -> None:
        other_claim = _read_new_json(path) if include_submitted else json_files.load_document(path, _FIELD_TYPES).value
        job_id, owner = other_claim.get("job_id"), other_claim.get("user", "another user")
        if job_id and include_submitted:
            raise ClusterTrainError(f"{self._run.id} was continued just now, by {owner}, as job {job_id}")
        if include_submitted or (not job_id and _is_submitting(other_claim)):
            raise ClusterTrainError(
                f"{self._run.id} is being continued by another command: {owner}, process {other_claim.get('pid')} on "
                f"{other_claim.get('host')}, is submitting it",
                fix=f"`clustertrain status {self._run.id}` shows its job in a moment",
            )

    def claim(self) -> None:
        """Claim the continuation. Raise ClusterTrainError if another command was faster."""
        fsio.claim_folder(self._folder)
        if not fsio.create_json(self._path, _build_claim()):
            self._check_claim(self._path, include_submitted=True)

    def submit(self, backend: Backend, options: Mapping[str, str]) -> str:
        """Submit the run again and return the job id.

        The cancel marker is archived, and restored if the submission fails.
        """
        return self._start(lambda: backend.submit(Submission(run=self._run, options=options)))

    def requeue_job(self, backend: Backend, job_id: str) -> str:
        """Requeue the ended job of a run in the user's own batch script, as :meth:`submit`, and return its id.

        Raises:
            ClusterTrainError: the scheduler no longer knows the job, or does not requeue it.
        """

        def requeue() -> str:
            try:
                backend.requeue(job_id)
            except SchedulerError as e:
                raise SchedulerError(
                    f"{self._run.id}: {e.message}",
                    fix="submit your batch script again with sbatch: it starts a new run of the same command",
                ) from e
            return job_id

        return self._start(requeue)

    def _start(self, start: Callable[[], str]) -> str:
        cancelled, archived = self._run.cancel_marker, self._run.path / f"cancelled-until-{clock.now():.0f}.json"
        with suppress(FileNotFoundError):
            cancelled.rename(archived)
        try:
            return start()
        except BaseException:
            with suppress(FileNotFoundError):
                archived.rename(cancelled)
            self._path.unlink(missing_ok=True)
            raise

    def record_job(self, job_id: str) -> None:
        """Record the job, after the run's events name it."""
        fsio.write_json(self._path, {**_build_claim(), "job_id": job_id})


def _build_claim() -> dict[str, Any]:
    created = psutil.Process().create_time()
    return {
        "user": settings.user_name(), "host": socket.gethostname(), "pid": os.getpid(), "created": created,
        "t": clock.now(),
    }  # fmt: skip


def _is_submitting(claim: Mapping[str, Any]) -> bool:
    """Return whether the command that made ``claim`` may still be submitting, by its process if on this machine."""
    if claim.get("host") != socket.gethostname():
        return bool(clock.now() - claim.get("t", 0.0) < SUBMIT_TIMEOUT_S)
    try:
        return bool(abs(psutil.Process(max(1, int(claim["pid"]))).create_time() - claim["created"]) < 2.0)
    except (psutil.NoSuchProcess, KeyError):
        return False


def _read_new_json(path: Path) -> dict[str, Any]:
    """Return the document that was just created at ``path``; wait if it is empty, as without hard links."""
    document: dict[str, Any] = {}

    def try_read() -> bool:
        document.update(json_files.load_document(path, _FIELD_TYPES).value)
        return bool(document)

    clock.wait_until(try_read, WRITE_TIMEOUT_S, 0.1)
    return document


def _describe_options(options: Mapping[str, str]) -> str:
    return f"with{_format_options(options)}" if options else "without options"


def _format_options(options: Mapping[str, str]) -> str:
    return "".join(f" --{name} {value}" for name, value in options.items())

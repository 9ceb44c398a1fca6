"""The protocol that Slurm and the local supervisor implement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from clustertrain.run.run_dir import RunDir

# States that other code compares, in Slurm's spelling.
PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETING = "COMPLETING"
# All states of an ended job. Any other state, also an unknown one, means that the job has not ended.
TERMINAL_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
     "TIMEOUT"}
)  # fmt: skip


@dataclass(frozen=True)
class Submission:
    """``job.sh`` of a run, with options that override those in the script, for example to exclude nodes."""

    run: RunDir
    options: Mapping[str, str] = field(default_factory=dict)
    """Long options of sbatch without the dashes."""
    environ: Mapping[str, str] | None = None
    """Environment of the submission; None: the environment of this process."""


@dataclass(frozen=True)
class ArraySubmission:
    """The runs of a sweep, in the order of their numbers."""

    folder: Path
    """Folder of the sweep. On Slurm it holds the array's job.sh and, for each run, a link named by its number."""
    runs: Sequence[RunDir]
    max_concurrent: int | None = None
    """Most runs at a time; None: as many as the backend can run."""
    environ: Mapping[str, str] | None = None


@dataclass(frozen=True)
class JobView:
    """The current state of a job in the scheduler. Times are UTC epoch seconds."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    start_time: float | None = None
    """Slurm's estimate if the job is pending."""
    end_time: float | None = None
    """End of the time limit."""
    preempt_time: float | None = None
    nodes: tuple[str, ...] = ()

    @property
    def is_alive(self) -> bool:
        return self.state not in TERMINAL_STATES


@dataclass(frozen=True)
class JobStart:
    """One start of a job in the accounting; a requeued job has several."""

    job_id: str
    state: str
    start: float | None = None
    end: float | None = None
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""


class Backend(Protocol):
    """A scheduler that runs jobs."""

    name: str

    def submit(self, submission: Submission) -> str:
        """Submit the job and return its id.

        Raises:
            SchedulerError: the scheduler refused it; the message is the scheduler's.
            CommandFailed: the scheduler did not answer, but may have accepted the job.
        """

    def submit_array(self, array: ArraySubmission) -> list[str]:
        """Submit all runs or none, and return their job ids in order. Raises as :meth:`submit`."""

    def advice(self, partition: str) -> list[str]:
        """Return notes on ``partition`` ('' is the default one) for the user who submits to it."""

    def cancel(self, *job_ids: str) -> None:
        """End pending or running jobs without a requeue. Jobs that have already ended are not an error."""

    def requeue(self, job_id: str) -> None:
        """Requeue the job under its id.

        Raises:
            SchedulerError: the scheduler refused.
            CommandFailed: the scheduler did not answer; it is unknown whether it requeued the job.
        """

    def find_requeue_problem(self, job_id: str) -> str:
        """Return why the scheduler would not requeue the job; empty if it would, or does not say."""
        return ""

    def restart(self, job_id: str, submission: Submission) -> str:
        """Start the run of ``job_id`` again with other options instead of a requeue; return the id of the new job.

        Called from inside ``job_id``. Raises as :meth:`submit`. After CommandFailed it may be called again: it finds
        a job that the scheduler accepted without answering.
        """

    def current_job_id(self, environ: Mapping[str, str]) -> str | None:
        """Return the id of the job of this process; None outside a job."""

    def current_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the node names of the job of this process, in node-rank order; empty outside a job."""

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        """Return the state of these jobs in one query, without jobs that the scheduler no longer knows.

        Raises:
            CommandFailed: the scheduler did not answer, which does not mean "no such job".
        """

    def list_starts(self, job_id: str) -> list[JobStart]:
        """Return all starts of a job from the accounting, oldest first; empty without accounting."""

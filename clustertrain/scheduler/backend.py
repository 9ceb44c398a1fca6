"""The one protocol behind which Slurm and the local supervisor stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from clustertrain.run.run_dir import RunDir

# Scheduler words, in Slurm's spelling, that the rest of the code asks about.
PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETING = "COMPLETING"
# All that end a job; any other word, one that is not known here too, means that it is not over.
TERMINAL_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
     "TIMEOUT"}
)  # fmt: skip


@dataclass(frozen=True)
class Submission:
    """``job.sh`` of a run, with options that override the script's own (a resubmission without some nodes, say)."""

    run: RunDir
    options: Mapping[str, str] = field(default_factory=dict)  # sbatch long options without the dashes
    environ: Mapping[str, str] | None = None  # the submitting environment; default: this process's own


@dataclass(frozen=True)
class ArraySubmission:
    """The runs of a sweep, in the order of their numbers. ``folder`` is the sweep's: on Slurm it holds the array's
    job.sh, and for each run a link to it that has its number for a name."""

    folder: Path
    runs: Sequence[RunDir]
    max_concurrent: int | None = None  # how many may run at a time; None: as many as the backend has room for
    environ: Mapping[str, str] | None = None


@dataclass(frozen=True)
class JobView:
    """What the scheduler says of a job now. Times are UTC epoch seconds."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    start_time: float | None = None  # for a pending job Slurm's estimate
    end_time: float | None = None  # when the time limit falls
    preempt_time: float | None = None
    nodes: tuple[str, ...] = ()

    @property
    def is_alive(self) -> bool:
        return self.state not in TERMINAL_STATES


@dataclass(frozen=True)
class JobStart:
    """One start of a job as accounting remembers it; a requeued job has several."""

    job_id: str
    state: str
    start: float | None = None
    end: float | None = None
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""


class Backend(Protocol):
    name: str

    def submit(self, submission: Submission) -> str:
        """Hand the job over and return its id.

        Raises:
            SchedulerError: with the scheduler's own words.
            CommandFailed: it gave no answer, and may have the job all the same.
        """

    def submit_array(self, array: ArraySubmission) -> list[str]:
        """Hand over all runs or none, and return their job ids in order. Raises as :meth:`submit`."""

    def advice(self, partition: str) -> list[str]:
        """What the user should know of that partition ('' is the default one) before the job waits in it."""

    def cancel(self, *job_ids: str) -> None:
        """End the jobs, pending or running, for good. No error when one has ended already."""

    def requeue(self, job_id: str) -> None:
        """Put the job back in the queue under its id.

        Raises:
            SchedulerError: it said no.
            CommandFailed: it gave no answer, which says nothing about whether it did it.
        """

    def restart(self, job_id: str, submission: Submission) -> str:
        """From inside ``job_id``: a fresh start of its run with other options, in place of a requeue; returns the id of
        the job that will do it. Raises as :meth:`submit`; after no answer it may be called again, and finds the job
        where the scheduler has it."""

    def current_job_id(self, environ: Mapping[str, str]) -> str | None:
        """The id of the job that this process runs in, or None outside of one."""

    def current_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the nodes of the job that this process runs in, in node-rank order; empty outside of one."""

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        """What is known of these jobs now, in one question; jobs that are no longer known are absent.

        Raises CommandFailed when the scheduler does not answer: no answer is not 'no such job'.
        """

    def list_starts(self, job_id: str) -> list[JobStart]:
        """All starts of a job from accounting, oldest first; empty where there is no accounting."""

"""Documents about submissions: ``submit``, ``sweep`` and ``adopt``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from clustertrain.plan.planner import Plan
from clustertrain.submit.adopt.outcomes import Outcome

if TYPE_CHECKING:
    from clustertrain.submit import transaction


class SubmittedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was submitted."""

    run: str
    """Id of the run."""
    job_id: str
    """Its job: Slurm's id, or one that starts with `local-`."""
    backend: str
    """`slurm` or `local`."""
    state: str
    """`pending`."""
    run_dir: str
    """The folder with all files of the run."""


class SubmissionPreview(msgspec.Struct, frozen=True, kw_only=True):
    """What `submit` would do."""

    script: str
    """The batch script, job.sh."""
    plan: Plan
    """The plan of the run."""


class SweepRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep."""

    run: str
    """Id of the run."""
    job_id: str
    """Its job: a task of the job array, or an id that starts with `local-`."""
    state: str
    """`pending`."""
    run_dir: str
    """The folder with all files of the run."""
    values: dict[str, Any]
    """The values of this run, by dotted key of the recipe."""


class SubmittedSweep(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep that was submitted."""

    sweep: str
    """Id of the sweep."""
    job_id: str | None
    """The job array; null on the local backend."""
    backend: str
    """`slurm` or `local`."""
    sweep_dir: str
    """The folder of the sweep, with a link to each run."""
    runs: tuple[SweepRun, ...]
    """The runs, by task."""


class SweepRunPreview(msgspec.Struct, frozen=True, kw_only=True):
    """One run that `sweep` would submit."""

    values: dict[str, Any]
    """The values of this run, by dotted key of the recipe."""
    script: str
    """Its batch script."""
    plan: Plan
    """The plan of this run."""


class SweepPreview(msgspec.Struct, frozen=True, kw_only=True):
    """What `sweep` would do."""

    script: str | None
    """The batch script of the job array; null on the local backend."""
    runs: tuple[SweepRunPreview, ...]
    """The runs, by task."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the user has to decide."""

    line: int
    """Number of the line; 0: something that the script does not say."""
    text: str
    """The line, or the part of it that raises the question, with secrets masked."""
    detail: str
    """What has to be decided, and why."""


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """A batch script as a cluster profile and a submit command."""

    script: str
    """Path of the batch script."""
    lines: tuple[Outcome, ...]
    """What becomes of each line, without those in `decide`."""
    decide: tuple[Question, ...]
    """What is left to decide, by line."""
    name: str
    """Name of the cluster profile."""
    profile: dict[str, Any]
    """Keys of the cluster profile; empty if none is needed."""
    profile_text: str
    """The cluster profile as TOML."""
    path: str | None
    """The file that was written; null if none was."""
    submit: str
    """The submit command for a shell, with the change of the folder."""
    argv: tuple[str, ...]
    """The words of the submit command."""


def build_submitted(submitted: transaction.SubmittedRun) -> SubmittedRun:
    """Return the document of ``submit --json``."""
    run = submitted.run
    return SubmittedRun(
        run=run.id, job_id=submitted.job_id, backend=submitted.backend, state=submitted.state, run_dir=str(run.path)
    )

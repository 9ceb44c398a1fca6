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
    job_id: str | None
    backend: str
    """`slurm` or `local`."""
    state: str
    run_dir: str
    """The folder with all files of the run."""


class SubmissionPreview(msgspec.Struct, frozen=True, kw_only=True):
    """What `submit` would do."""

    script: str
    """The batch script, job.sh."""
    plan: Plan


class SweepRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep."""

    run: str
    job_id: str | None
    state: str
    run_dir: str
    values: dict[str, Any]
    """The values of this run, by key."""


class SubmittedSweep(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep that was submitted."""

    sweep: str
    """Id of the sweep."""
    job_id: str | None
    """The job array; null on the local backend."""
    backend: str
    sweep_dir: str
    runs: tuple[SweepRun, ...]


class SweepRunPreview(msgspec.Struct, frozen=True, kw_only=True):
    """One run that `sweep` would submit."""

    values: dict[str, Any]
    """The values of this run, by key."""
    script: str
    """Its batch script."""
    plan: Plan


class SweepPreview(msgspec.Struct, frozen=True, kw_only=True):
    """What `sweep` would do."""

    script: str | None
    """The batch script of the job array; null on the local backend."""
    runs: tuple[SweepRunPreview, ...]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the user has to decide."""

    line: int
    """Number of the line; 0: something that the script does not say."""
    text: str
    detail: str


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """A batch script as a cluster profile and a submit command."""

    script: str
    """Path of the batch script."""
    lines: tuple[Outcome, ...]
    """What becomes of each line."""
    decide: tuple[Question, ...]
    name: str
    """Name of the cluster profile."""
    profile: dict[str, Any]
    """Keys of the cluster profile; empty if none is needed."""
    profile_text: str
    """The cluster profile as TOML."""
    path: str | None
    """The file that was written."""
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

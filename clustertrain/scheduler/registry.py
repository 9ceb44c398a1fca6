"""Names of backends -> backends."""

from __future__ import annotations

from typing import Literal

from clustertrain.config.job import JobSpec
from clustertrain.config.parsing import text_of
from clustertrain.errors import CommandFailed, EnvironmentNotFit
from clustertrain.scheduler.backend import Backend

# "here": what is planned trains in this process's allocation or on this machine, as the checks of `diagnose`.
Purpose = Literal["submit", "dry-run", "plan", "here"]
# Keys of [job] that mean nothing without a queue. ``time`` is one: a limit of the local backend's needs its name.
_OF_SLURM = (
    "partition", "account", "qos", "time", "constraint", "exclude", "nodelist", "reservation", "mem", "dependency",
    "sbatch",
)  # fmt: skip


def backend(job: JobSpec, purpose: Purpose = "submit") -> Backend:
    """For a new run: ``auto`` is Slurm where sbatch answers, and this machine only where Slurm is not installed and
    nothing in ``job`` asks for a cluster: a job that was meant for its nodes must not start on the login node. A plan
    and the script of a dry run with ``slurm`` need no answer.

    Raises:
        EnvironmentNotFit: Slurm is needed and not here, or does not answer.
    """
    if job.backend == "local":
        return of_run("local")
    # Not at the top: each backend brings imports that the other does not need.
    from clustertrain.scheduler.slurm import SlurmBackend

    slurm = SlurmBackend()
    try:
        version, why = slurm.available(), "sbatch is not installed on this machine"
        silent = False
    except CommandFailed as e:
        version, why, silent = None, f"sbatch is installed here and does not answer: {e.message}", True
    asked = _asks_for_slurm(job)
    if version is not None or (purpose == "plan" and (job.backend == "slurm" or asked or silent)):
        return slurm
    if job.backend == "slurm":
        if purpose == "dry-run":
            return slurm
        raise EnvironmentNotFit(why, fix="submit on a login node, or run it on this machine with --backend local")
    if purpose != "here" and (silent or asked):
        reason = f"{why}; {' and '.join(asked)} ask{'s' * (len(asked) == 1)} for a cluster" if asked else why
        raise EnvironmentNotFit(
            f"{reason}. Nothing was started",
            fix="submit on a login node, or run it on this machine with --backend local; --dry-run --backend slurm "
            "prints the job script",
        )
    return of_run("local")


def _asks_for_slurm(job: JobSpec) -> list[str]:
    """What in ``job`` only a cluster has, in words."""
    found = [f"job.{name} = {text_of(getattr(job, name))}" for name in _OF_SLURM if getattr(job, name)]
    return [*found, f"job.nodes = {job.nodes}"] if job.nodes > 1 else found


def of_run(name: str) -> Backend:
    """The backend that a run was submitted to, whether or not it answers from here: a run's own files can always be
    read."""
    if name == "local":
        from clustertrain.scheduler.local import LocalBackend

        return LocalBackend()
    from clustertrain.scheduler.slurm import SlurmBackend

    return SlurmBackend()

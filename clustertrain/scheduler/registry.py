"""Names of backends -> backends."""

from __future__ import annotations

from typing import Literal

from clustertrain.config.job import JobSpec
from clustertrain.config.parsing.documents import format_value
from clustertrain.errors import CommandFailed, UnsuitableEnvironment
from clustertrain.scheduler.backend import Backend

# "here": what is planned trains in this process's allocation or on this machine, as the checks of `diagnose`.
Purpose = Literal["submit", "dry-run", "plan", "here"]
# Keys of [job] that mean nothing without a queue. ``time`` is one: a limit of the local backend's needs its name.
_SLURM_ONLY_KEYS = (
    "partition", "account", "qos", "time", "constraint", "exclude", "nodelist", "reservation", "mem", "dependency",
    "sbatch",
)  # fmt: skip


def select_backend(job: JobSpec, purpose: Purpose = "submit") -> Backend:
    """For a new run: ``auto`` is Slurm where sbatch answers, and this machine only where Slurm is not installed and
    nothing in ``job`` asks for a cluster: a job that was meant for its nodes must not start on the login node. A plan
    and the script of a dry run with ``slurm`` need no answer.

    Raises:
        UnsuitableEnvironment: Slurm is needed and not here, or does not answer.
    """
    if job.backend == "local":
        return get_backend("local")
    # Not at the top: each backend brings imports that the other does not need.
    from clustertrain.scheduler.slurm import SlurmBackend

    slurm = SlurmBackend()
    try:
        version, unavailable_reason = slurm.sbatch_version(), "sbatch is not installed on this machine"
        is_unresponsive = False
    except CommandFailed as e:
        version, unavailable_reason, is_unresponsive = (
            None,
            f"sbatch is installed here and does not answer: {e.message}",
            True,
        )
    requirements = _list_slurm_requirements(job)
    if version is not None or (purpose == "plan" and (job.backend == "slurm" or requirements or is_unresponsive)):
        return slurm
    if job.backend == "slurm":
        if purpose == "dry-run":
            return slurm
        raise UnsuitableEnvironment(
            unavailable_reason, fix="submit on a login node, or run it on this machine with --backend local"
        )
    if purpose != "here" and (is_unresponsive or requirements):
        reason = (
            f"{unavailable_reason}; {' and '.join(requirements)} ask{'s' * (len(requirements) == 1)} for a cluster"
            if requirements
            else unavailable_reason
        )
        raise UnsuitableEnvironment(
            f"{reason}. Nothing was started",
            fix="submit on a login node, or run it on this machine with --backend local; --dry-run --backend slurm "
            "prints the job script",
        )
    return get_backend("local")


def _list_slurm_requirements(job: JobSpec) -> list[str]:
    """What in ``job`` only a cluster has, in words."""
    requirements = [
        f"job.{name} = {format_value(getattr(job, name))}" for name in _SLURM_ONLY_KEYS if getattr(job, name)
    ]
    return [*requirements, f"job.nodes = {job.nodes}"] if job.nodes > 1 else requirements


def get_backend(name: str) -> Backend:
    """The backend that a run was submitted to, whether or not it answers from here: a run's own files can always be
    read."""
    if name == "local":
        from clustertrain.scheduler.local import LocalBackend

        return LocalBackend()
    from clustertrain.scheduler.slurm import SlurmBackend

    return SlurmBackend()

"""Selection of the backend of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec
from clustertrain.config.parsing.documents import format_value
from clustertrain.errors import CommandFailed, UnsuitableEnvironment
from clustertrain.scheduler.backend import Backend

# "here": the job trains inside this process's allocation or on this machine, as the checks of `diagnose` do.
Purpose = Literal["submit", "dry-run", "plan", "here"]
# Keys of [job] that imply Slurm. A time limit for the local backend therefore needs backend = "local".
_SLURM_ONLY_KEYS = (
    "partition", "account", "qos", "time", "constraint", "exclude", "nodelist", "reservation", "mem", "dependency",
    "sbatch",
)  # fmt: skip


def select_backend(job: JobSpec, purpose: Purpose = "submit") -> Backend:
    """Return the backend for a new run.

    ``auto`` means Slurm if sbatch answers. It means this machine only if Slurm is not installed and nothing in ``job``
    needs a cluster, since a job for cluster nodes must not start on the login node. A plan, and a dry run with
    ``slurm``, do not need an answer.

    Raises:
        UnsuitableEnvironment: Slurm is needed but is not installed or does not answer.
    """
    if job.backend == "local":
        return get_backend("local")
    # Not at the top: each backend brings imports that the other does not need.
    from clustertrain.scheduler.slurm import SlurmBackend

    slurm = SlurmBackend()
    try:
        version, problem = slurm.sbatch_version(), "sbatch is not installed on this machine"
        is_unresponsive = False
    except CommandFailed as e:
        # sbatch prints one line for each thing that it tried, and the reason last.
        version, problem = None, f"sbatch is installed here but does not answer: {e.message.splitlines()[-1].strip()}"
        is_unresponsive = True
    requirements = _list_slurm_requirements(job)
    if version is not None or (purpose == "plan" and (job.backend == "slurm" or requirements or is_unresponsive)):
        return slurm
    if job.backend == "slurm":
        if purpose == "dry-run":
            return slurm
        raise UnsuitableEnvironment(problem, fix=_suggest(is_unresponsive, "--backend local runs it on this machine"))
    if purpose != "here" and (is_unresponsive or requirements):
        needs = f"{' and '.join(requirements)} need{'s' * (len(requirements) == 1)} a cluster; " if requirements else ""
        raise UnsuitableEnvironment(
            f"nothing was started: {needs}{problem}",
            fix=_suggest(
                is_unresponsive,
                "--dry-run --backend slurm prints the job script, and --backend local runs it on this machine",
            ),
        )
    return get_backend("local")


def _suggest(is_unresponsive: bool, otherwise: str) -> str:
    """Return what to do without Slurm. Where its commands are installed, the machine may well be a login node."""
    if is_unresponsive:
        return (
            "see whether `sinfo` answers; if not, Slurm is down or this machine is not set up for it: try later, or on "
            f"another login node. {otherwise}"
        )
    return f"submit on a login node. {otherwise}"


def _list_slurm_requirements(job: JobSpec) -> list[str]:
    """Return the settings in ``job`` that only a cluster supports, as text."""
    requirements = _format_settings(job, _SLURM_ONLY_KEYS)
    return [*requirements, f"job.nodes = {job.nodes}"] if job.nodes > 1 else requirements


def list_settings_without_effect(job: JobSpec, profile: ClusterProfile) -> list[str]:
    """Return the settings in ``job`` that the local backend ignores, as text, without the values of the profile.

    The local backend has time limits too.
    """
    names = [name for name in _SLURM_ONLY_KEYS if name != "time"]
    return _format_settings(job, [name for name in names if getattr(job, name) != getattr(profile, name, None)])


def _format_settings(job: JobSpec, names: Iterable[str]) -> list[str]:
    return [f"job.{name} = {format_value(getattr(job, name))}" for name in names if getattr(job, name)]


def get_backend(name: str) -> Backend:
    """Return a backend by name, whether or not it answers: the files of a run can be read without it."""
    if name == "local":
        from clustertrain.scheduler.local import LocalBackend

        return LocalBackend()
    from clustertrain.scheduler.slurm import SlurmBackend

    return SlurmBackend()

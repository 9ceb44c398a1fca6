"""Names of backends -> backends."""

from __future__ import annotations

from clustertrain.errors import EnvironmentNotFit
from clustertrain.launch.backend import Backend
from clustertrain.spec.job import BackendName


def backend(name: BackendName) -> Backend:
    """For a new run: ``auto`` is Slurm where sbatch answers, else this machine.

    Raises:
        EnvironmentNotFit: Slurm was asked for and does not answer.
    """
    if name == "local":
        return of_run("local")
    # Not at the top: each backend brings imports that the other does not need.
    from clustertrain.launch.slurm import SlurmBackend

    slurm = SlurmBackend()
    if slurm.available():
        return slurm
    if name == "slurm":
        raise EnvironmentNotFit(
            "sbatch does not answer on this machine", fix="submit on a login node, or use --backend local"
        )
    return of_run("local")


def of_run(name: str) -> Backend:
    """The backend that a run was submitted to, whether or not it answers from here: a run's own files can always be
    read."""
    if name == "local":
        from clustertrain.launch.local import LocalBackend

        return LocalBackend()
    from clustertrain.launch.slurm import SlurmBackend

    return SlurmBackend()

"""``--backend auto|slurm|local`` -> the backend."""

from __future__ import annotations

from clustertrain.errors import EnvironmentNotFit
from clustertrain.launch.backend import Backend
from clustertrain.spec.job import BackendName


def backend(name: BackendName) -> Backend:
    """``auto`` is Slurm where sbatch answers, else this machine.

    Raises:
        EnvironmentNotFit: Slurm was asked for and does not answer.
    """
    # Not at the top: each backend brings imports that the other does not need.
    if name != "local":
        from clustertrain.launch.slurm import SlurmBackend

        slurm = SlurmBackend()
        if slurm.available():
            return slurm
        if name == "slurm":
            raise EnvironmentNotFit(
                "sbatch does not answer on this machine", fix="submit on a login node, or use --backend local"
            )
    from clustertrain.launch.local import LocalBackend

    return LocalBackend()

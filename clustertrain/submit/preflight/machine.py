"""Checks of this machine and its folders against a planned run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from clustertrain import settings
from clustertrain.config.checks import storage_paths
from clustertrain.errors import ConfigError, UnsuitableEnvironment
from clustertrain.plan.layout import pluralize
from clustertrain.scheduler.registry import list_settings_without_effect
from clustertrain.submit.preflight import filesystem
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.resolve import count_gpus, has_gpu

_MAX_RANKS_PER_CORE = 4  # on the CPU. More are not a test on a laptop, but a job that was meant for a cluster


def check_gpu(prepared: PreparedRun) -> None:
    """Refuse device cuda with the local backend on a machine without a GPU."""
    if prepared.backend.name != "local" or prepared.plan.device != "cuda" or has_gpu():
        return
    gpu_type = prepared.spec.job.gpu_type
    gpu_note = f" (job.gpu_type = {gpu_type!r} requires one)" if gpu_type else ""
    raise UnsuitableEnvironment(
        f"device is cuda{gpu_note}, but this machine has no GPU",
        fix="use --device cpu, or submit on a login node of a cluster with GPUs",
    )


def check_size(prepared: PreparedRun) -> None:
    """Refuse far more ranks than this machine has cores, or more than it has GPUs, if only ``auto`` chose it."""
    plan = prepared.plan
    if prepared.backend.name != "local" or prepared.requested_backend != "auto":
        return
    if plan.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        limit, machine = cores * _MAX_RANKS_PER_CORE, pluralize(cores, "core")
    else:
        limit = count_gpus()  # 0 if they are not NVIDIA's and cannot be counted
        machine = pluralize(limit, "GPU")
    if limit and plan.world_size > limit:
        size = f"{pluralize(plan.world_size, 'rank')} on a machine with {machine}"
        raise UnsuitableEnvironment(
            f"nothing was started: {size} need a cluster; sbatch is not installed on this machine",
            fix="submit on a login node. --dry-run --backend slurm prints the job script, and --backend local runs it "
            "on this machine",
        )


def check_home_path(prepared: PreparedRun) -> None:
    """Refuse characters in CLUSTERTRAIN_HOME that Slurm or PYTHONPATH interpret."""
    # Slurm expands %j and similar, and removes backslashes, in the path of the job's log, even in the part that is the
    # working directory (seen on 22.05: the job fails at once without a message); ':' separates folders in PYTHONPATH.
    invalid = [c for c in (":%\\" if _is_slurm(prepared) else ":") if c in str(settings.home())]
    if invalid:
        raise ConfigError(
            f"{settings.HOME} = {settings.home()}: the path contains {' and '.join(invalid)}, which cannot be used",
            fix=f"set {settings.HOME} to another folder",
        )


def check_home_folder(prepared: PreparedRun) -> list[str]:
    """Refuse a CLUSTERTRAIN_HOME that cannot be written or that compute nodes cannot see."""
    return _check_folder(settings.home(), settings.HOME, shared=_is_slurm(prepared))


def check_checkpoint_dir(prepared: PreparedRun) -> list[str]:
    """Refuse a checkpoint_dir that cannot be written or that compute nodes cannot see."""
    folder = prepared.spec.job.checkpoint_dir
    return _check_folder(Path(folder), "checkpoint_dir", shared=_is_slurm(prepared)) if folder else []


def check_checkpoint_storage(prepared: PreparedRun) -> list[str]:
    """Refuse a checkpoint.remote without its package, and a checkpoint.local that cannot be written here."""
    # No object store is contacted.
    checkpoint = prepared.spec.recipe.checkpoint
    if checkpoint.remote and prepared.python.ranks.path == sys.executable:
        storage_paths.find_filesystem_class(checkpoint.remote)
    if not checkpoint.local or prepared.backend.name != "local":
        return []
    try:
        folder = storage_paths.resolve_node_folder(checkpoint.local, {**os.environ, **prepared.spec.env})
    except UnsuitableEnvironment as e:
        return [f"checkpoint.local: {e.message}; it is used on nodes where it is available"]
    return _check_folder(folder, "checkpoint.local", shared=False)


def check_python(prepared: PreparedRun) -> list[str]:
    """Refuse a Python that was named for the job and cannot be executed, as far as this machine can see it."""
    python = Path(prepared.spec.job.python)
    if not prepared.spec.job.python or prepared.spec.job.container:
        return []
    label = f"python = {str(python)!r}" + (" of the cluster profile" if _is_from_profile(prepared) else "")
    if python.is_file() and os.access(python, os.X_OK):
        is_asked = prepared.python.ranks.packages is not None or prepared.profile.setup
        return [] if is_asked else [f"{label} does not run on this machine, so its packages are not checked"]
    problem = "cannot be executed" if os.path.lexists(python) else "does not exist"
    filesystem_type = filesystem.find_shared_filesystem_type(python)
    if prepared.backend.name == "local" or filesystem_type:
        location_note = f", and {filesystem_type} is the same on all nodes" if filesystem_type else ""
        raise ConfigError(
            f"{label} {problem}{location_note}",
            fix="name another one with --python or in the profile, or remove it to use the Python that runs submit",
        )
    return [f"{label} {problem} on this machine: the job fails on nodes without it"]


def _is_from_profile(prepared: PreparedRun) -> bool:
    return prepared.spec.job.python == prepared.profile.python


def note_local_backend(prepared: PreparedRun) -> list[str]:
    """Note that the run stays on this machine, and which settings that makes useless; refuse nothing."""
    if prepared.backend.name != "local":
        return []
    plan, cores = prepared.plan, len(os.sched_getaffinity(0))
    device = "CPU" if plan.device == "cpu" else "GPU"
    nodes = f"{plan.nodes} nodes, " if plan.nodes > 1 else ""
    core_note = f" with {pluralize(cores, 'core')}" if plan.world_size > cores else ""
    note = f"local backend: {device}, {nodes}{pluralize(plan.world_size, 'rank')} on this machine{core_note}"
    ignored = list_settings_without_effect(prepared.spec.job, prepared.profile)
    return [f"{note}; for Slurm only, without effect here: {', '.join(ignored)}" if ignored else note]


def _check_folder(folder: Path, setting: str, *, shared: bool) -> list[str]:
    note = filesystem.check_folder(folder, setting, shared=shared)
    return [note] if note else []


def _is_slurm(prepared: PreparedRun) -> bool:
    return prepared.backend.name == "slurm"

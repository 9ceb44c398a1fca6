"""Phase 2, resolve: merge profile < recipe < ``--set`` < options into a RunSpec with backend, device and code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import settings
from clustertrain.config import cluster
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import Device, JobSpec, RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.scheduler import registry
from clustertrain.scheduler.backend import Backend
from clustertrain.submit import container, option_names
from clustertrain.submit.prepared_run import ResolvedRun
from clustertrain.submit.program import job_python
from clustertrain.submit.recipe import ParsedRecipe
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.snapshot import python_path

_PROFILE_KEYS = (
    "python", "environment", "environment_dir", "partition", "account", "qos", "time", "mem", "gpu_type",
    "cpus_per_gpu", "container", "container_runtime",
)  # fmt: skip


def resolve_run(
    parsed: ParsedRecipe, existing_backend: Backend | None = None, purpose: registry.Purpose = "submit"
) -> ResolvedRun:
    """Merge the profile, the recipe and the options, and choose the backend and the device.

    Args:
        existing_backend: the backend that was selected earlier for the same request; it is not selected again.

    Raises:
        ConfigError: the profile does not exist, options contradict each other, or one snapshot cannot contain all
            entries.
        UsageError: the command that ``--python`` names does not exist.
        UnsuitableEnvironment: Slurm is needed but does not answer on this machine.
    """
    request, values = parsed.request, parsed.values
    profile = cluster.load_profile(request.job.get("cluster") or values.job.cluster, request.environ)
    job = _merge_job(profile, parsed.document.get("job", {}), request.job, request.cwd)
    job = msgspec.structs.replace(
        job,
        name=job.name or parsed.name,
        checkpoint_dir=_resolve_checkpoint_dir(request.cwd, job.checkpoint_dir),
    )
    backend = (
        existing_backend
        if existing_backend is not None and job.backend in ("auto", existing_backend.name)
        else registry.select_backend(job, purpose)
    )
    device = _resolve_device(
        job.device if job.device != "auto" else profile.device,
        backend.name,
        job.gpu_type if purpose != "here" else "",
    )
    recipe = _resolve_data_paths(parsed.recipe, request.cwd)
    search_path = _build_search_path(request, recipe)
    code = _find_code(parsed, recipe, search_path)
    env = {**profile.env, **values.env, **request.env}
    if job.container:
        python = job_python.choose_in_container(job.python, profile.python, parsed.script, request, env)
        job = container.add_code_mount(job, code)
    else:
        python = job_python.choose(job.python, parsed.script, request, env, has_setup=bool(profile.setup))
        job = msgspec.structs.replace(job, python=python.ranks.path if job.python else "")
    return ResolvedRun(
        parsed=parsed,
        spec=RunSpec(
            job=msgspec.structs.replace(job, backend=backend.name, device=device),
            recipe=recipe,
            script=python.script,
            env=env,
            secret_env=tuple(sorted(request.env)),
            wrapped=request.wrapped,
        ),
        profile=profile,
        backend=backend,
        requested_device=job.device,
        requested_backend=job.backend,
        python=python,
        search_path=search_path,
        code=code,
    )


def has_gpu() -> bool:
    """Return whether this machine may have a GPU that torch can use: NVIDIA, AMD, or the GPU of a Windows host."""
    return _has_nvidia_gpu() or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _has_nvidia_gpu() -> bool:
    return count_gpus() > 0


def _merge_job(profile: ClusterProfile, recipe: Mapping[str, Any], options: Mapping[str, Any], cwd: Path) -> JobSpec:
    values = {key: getattr(profile, key) for key in _PROFILE_KEYS}
    if {**values, **recipe, **options}["container"]:  # the profile's interpreter and environment are outside the image
        del values["python"], values["environment"]
    values |= {**recipe, **options}
    values["sbatch"] = {**profile.sbatch, **recipe.get("sbatch", {}), **options.get("sbatch", {})}
    with option_names.named(options):
        job = build(values, JobSpec, "job", prefix="job.")
        return container.resolve_container(job, profile, cwd)


def _resolve_checkpoint_dir(cwd: Path, folder: str) -> str:
    return str(cwd / settings.expand_user_path(folder, "job.checkpoint_dir")) if folder else ""


def _resolve_device(requested: Device, backend: str, gpu_type: str) -> Device:
    """Return the device. ``auto`` means cuda on Slurm or with a named GPU type; otherwise this machine decides."""
    if requested != "auto":
        return requested
    return "cuda" if backend == "slurm" or gpu_type or _has_nvidia_gpu() else "cpu"


def _resolve_data_paths(recipe: Recipe, cwd: Path) -> Recipe:
    """Make paths absolute, because the ranks run in another folder than ``submit``."""
    absolute = {key: str(cwd / path) for key, path in recipe.data_files.items()}
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, **absolute))


def _get_entries(recipe: Recipe) -> dict[str, str]:
    return {"model.entry": recipe.model.entry, "data.entry": recipe.data.entry}


def _build_search_path(request: SubmitRequest, recipe: Recipe) -> tuple[Path, ...]:
    """Return the folders that may contain the user's code; none if the recipe has no entry."""
    if not any(_get_entries(recipe).values()):
        return ()
    recipe_folder = [(request.cwd / request.target).parent] if request.target else []
    return tuple(python_path.list_search_folders([*recipe_folder, request.cwd]))


def _find_code(parsed: ParsedRecipe, recipe: Recipe, search_path: tuple[Path, ...]) -> Path | None:
    if parsed.script is not None:
        return Path(parsed.script.path) if parsed.script.path else None
    return python_path.find_shared_entry(_get_entries(recipe), search_path)

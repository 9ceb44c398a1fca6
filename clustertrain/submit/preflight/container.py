"""Checks of the image, the runtime and the mounts of a run in containers."""

from __future__ import annotations

from pathlib import Path

from clustertrain.config.container import is_registry_image, parse_mount
from clustertrain.errors import ConfigError, UnsuitableEnvironment
from clustertrain.submit.preflight import filesystem
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.sysinfo import containers


def check_container(prepared: PreparedRun) -> list[str]:
    """Refuse an image or a mount that does not exist, and a runtime that is missing or takes no such image."""
    job = prepared.spec.job
    if not job.container:
        return []
    notes = []
    for text in job.container_mounts:
        notes += _check_exists(prepared, parse_mount(text).source, "container_mounts")
    if not is_registry_image(job.container) and (missing := _check_exists(prepared, job.container, "container")):
        return [*notes, *missing]
    kind = containers.find_image_kind(job.container)
    try:
        runtime = containers.choose_runtime(job.container, kind, job.container_runtime, prepared.parsed.request.environ)
    except UnsuitableEnvironment as e:
        if prepared.backend.name == "local":
            raise
        return [*notes, f"{e.message} on this machine: the job fails on nodes without it"]
    return [*notes, f"the ranks run in containers of {runtime.name}"]


def _check_exists(prepared: PreparedRun, path: str, key: str) -> list[str]:
    """Refuse a path that does not exist; note one that only the nodes may have, such as a folder of a local disk."""
    if Path(path).exists():
        return []
    is_shared = filesystem.find_shared_filesystem_type(Path(path))
    if prepared.backend.name == "local" or is_shared or Path(path).parent.is_dir():
        raise ConfigError(f"{key}: {path} does not exist", fix="check the path")
    return [f"{key}: {path} does not exist on this machine: the job fails on nodes without it"]

"""Checks of the image, the runtime and the mounts of a run in containers."""

from __future__ import annotations

from pathlib import Path

from clustertrain.config.container import is_registry_image, parse_mount
from clustertrain.errors import ConfigError, UnsuitableEnvironment
from clustertrain.submit import option_names
from clustertrain.submit.preflight import filesystem
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.sysinfo import containers


def check_container(prepared: PreparedRun) -> list[str]:
    """Refuse an image or a mount that does not exist, and a runtime that is missing or takes no such image."""
    if not prepared.spec.job.container:
        return []
    with option_names.named(prepared.parsed.request.job):
        return _check_container(prepared)


def _check_container(prepared: PreparedRun) -> list[str]:
    job = prepared.spec.job
    notes = []
    for text in job.container_mounts:
        notes += _check_exists(prepared, parse_mount(text).source, "container_mounts", "check the path")
    if not is_registry_image(job.container):
        fix = "check the path; write docker://NAME for an image of a registry"
        if missing := _check_exists(prepared, job.container, "container", fix):
            return [*notes, *missing]
    kind = containers.find_image_kind(job.container)
    try:
        runtime = containers.choose_runtime(job.container, kind, job.container_runtime, prepared.parsed.request.environ)
    except UnsuitableEnvironment as e:
        if prepared.backend.name == "local":
            raise
        return [*notes, f"{e.message} on this machine: the job fails on nodes without it"]
    return [*notes, f"the ranks run in containers of {runtime.name}"]


def _check_exists(prepared: PreparedRun, path: str, key: str, fix: str) -> list[str]:
    """Refuse a path that does not exist; note one that only the nodes may have, such as a folder of a local disk."""
    if Path(path).exists():
        return []
    is_shared = filesystem.find_shared_filesystem_type(Path(path))
    if prepared.backend.name == "local" or is_shared or Path(path).parent.is_dir():
        raise ConfigError(f"{key}: {path} does not exist", fix=fix)
    name = option_names.option_name(key) if key in prepared.parsed.request.job else key
    return [f"{name}: {path} does not exist on this machine: the job fails on nodes without it"]

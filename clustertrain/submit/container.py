"""The container of a request: which image it asks for, and what the paths of its image and mounts are."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from clustertrain import settings
from clustertrain.config import cluster
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.container import (
    Mount,
    find_registry_image,
    format_mount,
    is_registry_image,
    parse_mount,
)
from clustertrain.config.job import JobSpec
from clustertrain.config.parsing.documents import parse_assignment, parse_value
from clustertrain.errors import ConfigError, UsageError
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.snapshot import code_snapshot

_KEY = "job.container"


def find_image(request: SubmitRequest) -> str:
    """Return the image of a request for a command, before its options are merged; empty if it runs on the node.

    Raises:
        ConfigError: the profile does not exist or is invalid.
    """
    assignments = [parse_assignment(text) for text in request.assignments]
    values = {**{key: parse_value(text, key) for key, text in assignments if key == _KEY}, **request.sweep_values}
    if "container" in request.job or _KEY in values:
        return str(request.job.get("container", values.get(_KEY)))
    return cluster.load_profile(request.job.get("cluster", ""), request.environ).container


def resolve_container(job: JobSpec, profile: ClusterProfile, cwd: Path) -> JobSpec:
    """Return ``job`` with absolute paths and the mounts and options of the profile.

    Raises:
        UsageError: an option for the container is given without an image.
        ConfigError: a path cannot be made absolute, or the image is named as other programs name it.
    """
    if not job.container:
        if job.container_mounts or job.container_options:
            name = "container_mounts" if job.container_mounts else "container_options"
            raise UsageError(f"{name}: no effect without a container", fix="name an image with --container")
        return job
    mounts = [
        _resolve_mount(parse_mount(text), cwd)
        for text in dict.fromkeys((*profile.container_mounts, *job.container_mounts))
    ]
    image = job.container
    if not is_registry_image(image):
        _check_image_name(image, cwd)
        image = os.path.normpath(cwd / settings.expand_user_path(image, "job.container"))
    return msgspec.structs.replace(
        job,
        container=image,
        container_mounts=tuple(map(format_mount, mounts)),
        container_options=(*profile.container_options, *job.container_options),
    )


def _check_image_name(image: str, cwd: Path) -> None:
    """Refuse an image of a registry without ``docker://``, and other kinds of addresses."""
    scheme, separator, _ = image.partition("://")
    if separator:
        raise ConfigError(
            f"container = {image!r}: {scheme}:// is not supported",
            fix=f"pull the image first, such as apptainer pull image.sif {image}, or use docker://NAME",
        )
    if (suggestion := find_registry_image(image)) and not (cwd / image).exists():
        raise ConfigError(
            f"container = {image!r}: no such file or folder",
            fix=f"write container = {suggestion!r} for the image of a registry",
        )


def _resolve_mount(mount: Mount, cwd: Path) -> Mount:
    source = os.path.normpath(cwd / settings.expand_user_path(mount.source, "job.container_mounts"))
    if ":" in source:
        raise ConfigError(f"container_mounts: {source}: a container cannot mount a path with a colon", fix="rename it")
    return Mount(source, source if mount.target == mount.source else mount.target, mount.read_only)


def add_code_mount(job: JobSpec, code: Path | None) -> JobSpec:
    """Return ``job`` with a mount of the user's repository: the snapshot has links to what git ignores there."""
    root = code_snapshot.find_repository_root(code.parent.resolve()) if job.container and code is not None else None
    if root is None:
        return job
    mount = format_mount(_resolve_mount(Mount(str(root), str(root)), root))
    return msgspec.structs.replace(job, container_mounts=tuple(dict.fromkeys((mount, *job.container_mounts))))

"""Containers of the ranks: names of runtimes and the text of a mount."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from clustertrain.config.checks.invalid_value import InvalidValue

RuntimeName = Literal["auto", "apptainer", "charliecloud", "crun", "enroot", "podman", "runc"]
REGISTRY_PREFIX = "docker://"
_REGISTRY_NAME = re.compile(
    r"(?:(?P<host>[\w-][\w.-]*(?::\d+)?)(?P<separator>[/#]))?[\w-][\w.-]*(?:/[\w.-]+)*"
    r"(?P<tag>:[\w.-]+)?(?P<digest>@sha256:[0-9a-f]+)?"
)
_FILE_SUFFIXES = (".sif", ".sqsh", ".sqfs", ".squashfs", ".img", ".simg")


class Mount(NamedTuple):
    """A file or folder of the node that a container sees."""

    source: str
    target: str
    read_only: bool = False


def parse_mount(text: str) -> Mount:
    """Return the mount ``SRC[:DST[:ro]]``; DST is SRC by default. ``rw`` in place of ``ro`` is the default.

    Raises:
        InvalidValue: the text has another form.
    """
    fields, subject = text.split(":"), f"container_mounts = {text!r}"
    source, target = fields[0], fields[min(1, len(fields) - 1)]
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise InvalidValue(f"{subject}: control characters are not allowed", fix="rename the file or folder")
    if len(fields) > 3 or not all(fields):
        raise InvalidValue(
            f"{subject}: not SRC, SRC:DST or SRC:DST:ro", fix="write container_mounts = '/scratch:/data:ro'"
        )
    if fields[2:] not in ([], ["ro"], ["rw"]):
        raise InvalidValue(
            f"{subject}: {fields[2]} is neither ro (read-only) nor rw",
            fix=f"write container_mounts = {f'{source}:{target}:ro'!r}",
        )
    if len(fields) > 1 and not target.startswith("/"):
        raise InvalidValue(
            f"{subject}: {target} is not an absolute path in the container",
            fix=f"write container_mounts = {':'.join((source, '/' + target, *fields[2:]))!r}",
        )
    return Mount(source, target, fields[2:] == ["ro"])


def format_mount(mount: Mount) -> str:
    return f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")


def is_registry_image(image: str) -> bool:
    return image.startswith(REGISTRY_PREFIX)


def find_registry_image(name: str) -> str:
    """Return ``docker://NAME`` for a name of an image of a registry as docker or Pyxis takes it; empty for other texts.

    Only a tag, a digest, Pyxis's ``#`` or a registry's host tells it from a path.
    """
    match = _REGISTRY_NAME.fullmatch(name)
    if match is None or name.endswith(_FILE_SUFFIXES):
        return ""
    is_registry = match["host"] and (match["separator"] == "#" or "." in match["host"] or ":" in match["host"])
    if not (is_registry or match["tag"] or match["digest"]):
        return ""
    return REGISTRY_PREFIX + name.replace("#", "/", 1)

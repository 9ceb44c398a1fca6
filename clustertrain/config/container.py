"""Containers of the ranks: names of runtimes and the text of a mount."""

from __future__ import annotations

from typing import Literal, NamedTuple

RuntimeName = Literal["auto", "apptainer", "charliecloud", "crun", "enroot", "podman", "runc"]
REGISTRY_PREFIX = "docker://"


class Mount(NamedTuple):
    """A file or folder of the node that a container sees."""

    source: str
    target: str
    read_only: bool = False


def parse_mount(text: str) -> Mount:
    """Return the mount ``SRC[:DST[:ro]]``; DST is SRC by default.

    Raises:
        ValueError: the text has another form.
    """
    fields = text.split(":")
    if len(fields) > 3 or not all(fields) or fields[2:] not in ([], ["ro"], ["rw"]):
        raise ValueError(f"mount {text!r}: must be SRC, SRC:DST or SRC:DST:ro")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError(f"mount {text!r}: control characters are not allowed")
    source, target = fields[0], fields[min(1, len(fields) - 1)]
    if len(fields) > 1 and not target.startswith("/"):
        raise ValueError(f"mount {text!r}: {target} must be an absolute path in the container")
    return Mount(source, target, fields[2:] == ["ro"])


def format_mount(mount: Mount) -> str:
    return f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")


def is_registry_image(image: str) -> bool:
    return image.startswith(REGISTRY_PREFIX)

"""Containers of a batch script: Pyxis' options of srun, and the command line of Apptainer, as ``--container``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from clustertrain.config.container import REGISTRY_PREFIX, format_mount, parse_mount
from clustertrain.errors import UsageError
from clustertrain.submit.shell.expansion import MARK

APPTAINER = frozenset({"apptainer", "singularity"})
_FIX = "clustertrain submit --container IMAGE --container-mount SRC:DST -- COMMAND starts the container without it"
# What --container does by itself, or has no need of.
_PYXIS_DEFAULTS = frozenset({
    "no-container-mount-home", "container-readonly", "container-remap-root", "no-container-remap-root",
    "no-container-entrypoint",
})  # fmt: skip
_APPTAINER_DEFAULTS = frozenset({
    "nv", "rocm", "cleanenv", "no-home", "no-eval", "e", "quiet", "silent", "q", "s", "verbose", "v",
})  # fmt: skip


@dataclass
class Container:
    """The container of the ranks."""

    image: str = ""
    mounts: list[str] = field(default_factory=list)
    """As ``SRC[:DST[:ro]]``."""
    env: list[str] = field(default_factory=list)
    """Assignments ``NAME=VALUE``."""
    warnings: list[str] = field(default_factory=list)
    """What may differ for the program."""

    def list_options(self) -> list[str]:
        """Return the options of submit."""
        mounts = [word for mount in self.mounts for word in ("--container-mount", mount)]
        return [*(["--container", self.image] if self.image else []), *mounts]

    def merge(self, outer: Container) -> Container:
        """Return this container with what ``outer``, the job's, asks for beside it."""
        return Container(
            self.image or outer.image,
            [*outer.mounts, *self.mounts],
            [*outer.env, *self.env],
            [*outer.warnings, *self.warnings],
        )


def take_option(container: Container, name: str, value: str, subject: str) -> None:
    """Add the option ``--container…`` of Slurm or of Pyxis to ``container``.

    Args:
        subject: the option in messages.

    Raises:
        UsageError: it cannot be honored.
    """
    if name == "container":
        container.image = value
    elif name == "container-image":
        container.image = _translate_pyxis_image(container, value, subject)
    elif name == "container-mounts":
        container.mounts += translate_mounts(value, subject)
    elif name == "container-mount-home":
        container.mounts.append("~")
    elif name == "container-workdir":
        container.warnings.append(f"--container-workdir: call submit in {value}, which is the folder of the ranks")
    elif name == "container-writable":
        container.warnings.append("--container-writable: the root file system is read-only, except with podman")
    elif name not in _PYXIS_DEFAULTS:
        raise UsageError(f"{subject}: cannot be honored", fix=f"remove it; {_FIX}")


def _translate_pyxis_image(container: Container, text: str, subject: str) -> str:
    """Return the image ``PATH`` or ``[docker://][USER@][REGISTRY#]IMAGE[:TAG]`` as submit names it."""
    if not text:
        raise UsageError(f"{subject}: the value is missing", fix="name the image")
    if text.startswith(("/", "./")):
        return text
    if MARK.match(text):
        container.warnings.append("an image of a registry needs docker:// before its name: --container docker://NAME")
        return text
    scheme, separator, name = text.rpartition("://")
    if separator and scheme != REGISTRY_PREFIX.removesuffix("://"):
        raise UsageError(
            f"{subject}: {scheme}:// is a store of one machine",
            fix="name a file or an image of a registry: --container docker://NAME",
        )
    registry, has_registry, image = name.rpartition("#")
    user, has_user, host = (registry if has_registry else image).rpartition("@")
    if has_user and not host.startswith("sha256:"):
        container.warnings.append(f"{user}@: the container runtime logs in to the registry with its own settings")
        registry, image = (host, image) if has_registry else ("", host)
    return REGISTRY_PREFIX + (f"{registry}/{image}" if registry else image)


def translate_mounts(text: str, subject: str) -> list[str]:
    """Return the mounts ``SRC[:DST[:OPTION]]``, separated by commas, as submit names them.

    Raises:
        UsageError: a mount has an option that submit does not take.
    """
    try:
        return [format_mount(parse_mount(part)) if ":" in part else part for part in text.split(",") if part]
    except ValueError as e:
        problem = str(e).removeprefix("container_mounts = ")
        raise UsageError(
            f"{subject}: {problem}", fix="write the mount as --container-mount SRC:DST or SRC:DST:ro"
        ) from e


def parse_apptainer(words: Sequence[str]) -> tuple[Container, list[str]] | None:
    """Return the container of ``apptainer exec|run [OPTIONS] IMAGE COMMAND`` and the command in it.

    None: it does something else, such as ``apptainer pull``.

    Raises:
        UsageError: an option cannot be honored.
    """
    runtime, rest, container = PurePath(words[0]).name, list(words[1:]), Container()
    action = ""
    while rest and (rest[0].startswith("-") or not action):
        word = rest.pop(0)
        if word.startswith("-"):
            _take_apptainer_option(container, runtime, word, rest)
        elif word in ("exec", "run"):
            action = word
        else:
            return None
    if not action:
        return None
    if len(rest) < 2:
        raise UsageError(f"{runtime} {action}: no command after the image", fix=f"name the program; {_FIX}")
    image, *command = rest
    if re.match(r"[a-z-]+:", image) and not image.startswith(REGISTRY_PREFIX):
        raise UsageError(
            f"{runtime} {action} {image}: not an image that submit takes",
            fix=f"pull it once ({runtime} pull IMAGE.sif {image}), and name the file: --container IMAGE.sif",
        )
    container.image = image
    if action == "run":
        container.warnings.append(f"{runtime} run: the script of the image (%runscript) is not executed")
    return container, command


def _take_apptainer_option(container: Container, runtime: str, word: str, rest: list[str]) -> None:
    text, has_value, value = word.lstrip("-").partition("=")
    if not word.startswith("--") and text[:1] == "B" and text != "B":  # -B/data
        text, has_value, value = "B", "=", text[1:] + has_value + value
    if text in _APPTAINER_DEFAULTS:
        return
    if text not in ("bind", "B", "env"):
        raise UsageError(f"{runtime} {word}: cannot be honored", fix=f"remove it; {_FIX}")
    if not has_value:
        value = rest.pop(0) if rest else ""
    if text == "env":
        container.env += value.split(",")
    else:
        container.mounts += translate_mounts(value, f"{runtime} {word}")


def refuse_runtime(runtime: str, command: Sequence[str]) -> UsageError:
    """Return the refusal of a container runtime that starts ``command``, as far as it is known."""
    words = [word if MARK.search(word) else shlex.quote(word) for word in command[:6]]
    shown = " ".join([*words, *(["…"] if len(command) > 6 else [])]) or "COMMAND"
    return UsageError(
        f"{runtime}: its command line is not translated",
        fix=f"name the image and its mounts to submit: clustertrain submit --container docker://IMAGE "
        f"--container-mount SRC:DST -- {shown}",
    )

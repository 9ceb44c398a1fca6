"""Container images and the runtimes that start them: what an image is, and which programs are installed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from clustertrain import reading
from clustertrain.config.container import REGISTRY_PREFIX, RuntimeName, is_registry_image
from clustertrain.errors import ConfigError, UnsuitableEnvironment

ImageKind = Literal["registry", "sif", "squashfs", "bundle", "folder"]
_DESCRIPTIONS: dict[ImageKind, str] = {
    "registry": "an image of a registry",
    "sif": "a SIF image",
    "squashfs": "a SquashFS image",
    "bundle": "an OCI bundle",
    "folder": "a folder with a root file system",
}
# Kinds of images by runtime. For each kind, the first runtime that is installed is the default.
_KINDS: dict[RuntimeName, tuple[ImageKind, ...]] = {
    "apptainer": ("sif", "registry", "folder", "bundle"),
    "enroot": ("squashfs",),
    "charliecloud": ("folder", "squashfs", "bundle"),
    "podman": ("registry", "folder", "bundle"),
    "crun": ("bundle", "folder"),
    "runc": ("bundle", "folder"),
}
_DEFAULT_ORDER: dict[ImageKind, tuple[RuntimeName, ...]] = {
    "registry": ("podman", "apptainer"),
    "sif": ("apptainer",),
    "squashfs": ("enroot", "charliecloud"),
    "bundle": ("crun", "runc", "podman", "charliecloud", "apptainer"),
    "folder": ("charliecloud", "apptainer", "podman", "crun", "runc"),
}
_PROGRAMS: dict[RuntimeName, tuple[str, ...]] = {"apptainer": ("apptainer", "singularity"), "charliecloud": ("ch-run",)}
# runc is in /usr/sbin on Debian, which is not in the PATH of users.
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_REGISTRY_IMAGE = re.compile(re.escape(REGISTRY_PREFIX) + r"\w[\w.:/@-]*")
_SIF_MAGIC, _SIF_MAGIC_AT = b"SIF_MAGIC", 32  # after the launch line (github.com/apptainer/sif)
_SQUASHFS_MAGIC = b"hsqs"


class Runtime(NamedTuple):
    """A runtime with the absolute path of its program."""

    name: RuntimeName
    program: str


def find_image_kind(image: str) -> ImageKind:
    """Return what ``image`` is.

    Raises:
        ConfigError: it does not exist, or is none of the known kinds.
    """
    if is_registry_image(image):
        if not _REGISTRY_IMAGE.fullmatch(image):
            example = image.replace("#", "/", 1)  # Enroot's separator
            suggestion = example if _REGISTRY_IMAGE.fullmatch(example) else "docker://REGISTRY/NAME:TAG"
            raise ConfigError(f"container = {image!r}: not the name of an image", fix=f"write {suggestion}")
        return "registry"
    path = Path(image)
    if path.is_dir():
        if (path / "config.json").is_file():
            return "bundle"
        if any((path / name).exists() for name in ("bin", "usr")):
            return "folder"
        raise ConfigError(
            f"container = {image!r}: the folder has neither config.json, as an OCI bundle, nor bin or usr, as a root "
            "file system",
            fix="name the folder with the unpacked image",
        )
    if not path.exists():
        raise ConfigError(
            f"container = {image!r}: no such file or folder",
            fix="check the path; write docker://NAME for an image of a registry",
        )
    with path.open("rb") as file:
        begin = file.read(_SIF_MAGIC_AT + len(_SIF_MAGIC))
    if begin[_SIF_MAGIC_AT:] == _SIF_MAGIC:
        return "sif"
    if begin.startswith(_SQUASHFS_MAGIC):
        return "squashfs"
    raise ConfigError(
        f"container = {image!r}: the file is neither a SIF nor a SquashFS image",
        fix="name a .sif or .sqsh file, an OCI bundle, a folder with a root file system, or docker://NAME",
    )


def check_runtime(image: str, kind: ImageKind, runtime: RuntimeName) -> None:
    """Raise ConfigError if ``runtime`` cannot start images of this kind."""
    if runtime != "auto" and kind not in _KINDS[runtime]:
        raise ConfigError(
            f"container_runtime = {runtime!r}: cannot start {_DESCRIPTIONS[kind]} ({image})",
            fix=f"use {_list_names(_DEFAULT_ORDER[kind])}, or another image",
        )


def choose_runtime(image: str, kind: ImageKind, requested: RuntimeName, environ: Mapping[str, str]) -> Runtime:
    """Return the runtime: the requested one, or the first that is installed and takes such images.

    Raises:
        ConfigError: the requested one cannot start such images.
        UnsuitableEnvironment: it is not installed on this machine, or none is.
    """
    check_runtime(image, kind, requested)
    candidates = _DEFAULT_ORDER[kind] if requested == "auto" else (requested,)
    for name in candidates:
        if program := find_program(name, environ):
            return Runtime(name, program)
    if requested != "auto":
        others = [name for name in _DEFAULT_ORDER[kind] if find_program(name, environ)]
        fix = f"install it, or use {_list_names(others)}" if others else "install it"
        raise UnsuitableEnvironment(f"container_runtime = {requested!r}: it is not installed", fix=fix)
    raise UnsuitableEnvironment(
        f"container = {image!r}: no runtime for {_DESCRIPTIONS[kind]} is installed",
        fix=f"install {_list_names(candidates)}",
    )


def find_program(runtime: RuntimeName, environ: Mapping[str, str]) -> str:
    """Return the path of the program of a runtime; empty if it is not installed."""
    path = f"{environ.get('PATH', '')}:{_SYSTEM_PATH}"
    found = (shutil.which(name, path=path) for name in _PROGRAMS.get(runtime, (runtime,)))
    return next((str(Path(program).absolute()) for program in found if program), "")


def read_bundle(bundle: Path) -> dict[str, Any]:
    """Return the configuration of an OCI bundle.

    Raises:
        ConfigError: config.json cannot be read, or is not a configuration.
    """
    path = bundle / "config.json"
    try:
        config = json.loads(reading.read_text(path))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: {e}", fix="write it again, for example with umoci unpack") from e
    is_valid = isinstance(config, dict) and all(isinstance(config.get(k, {}), dict) for k in ("root", "process"))
    if not is_valid or not isinstance(config.get("root", {}).get("path", "rootfs"), str):
        raise ConfigError(f"{path}: not the configuration of an OCI bundle", fix="write it again")
    return cast("dict[str, Any]", config)


def find_root_folder(image: str, kind: ImageKind) -> Path:
    """Return the root file system of a folder or of an OCI bundle."""
    if kind != "bundle":
        return Path(image)
    return Path(image, str(read_bundle(Path(image)).get("root", {}).get("path", "rootfs")))


def _list_names(names: tuple[RuntimeName, ...] | list[RuntimeName]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


assert set(_KINDS) | {"auto"} == set(get_args(RuntimeName))

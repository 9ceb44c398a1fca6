"""The virtual or conda environment of an interpreter, and what lies outside of it."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertrain import reading
from clustertrain.errors import ConfigError

_NO_SHIPPING = "submit without --ship-env"
_SYSTEM_PREFIXES = frozenset({Path("/"), Path("/usr")})  # each node has its own


@dataclass(frozen=True)
class PythonEnvironment:
    """An environment that can be packed."""

    prefix: Path
    version: str
    """``python3.12``."""
    base_python: Path | None = None
    """The interpreter from which the virtual environment was made, if it is packed too."""
    has_system_packages: bool = False
    """The packages of the base interpreter can be imported."""
    outside: tuple[str, ...] = ()
    """What the ranks still read from its own place."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The folder, by the name that was used and by its real one."""
        return tuple(dict.fromkeys((str(self.prefix), os.path.realpath(self.prefix))))


def find_environment(python: Path, origin: str = "") -> PythonEnvironment:
    """Return the environment of the interpreter ``python``.

    Args:
        origin: where it comes from, for messages, if the user has not named it.

    Raises:
        ConfigError: it belongs to none, or the environment cannot be read here.
    """
    prefix = python.parent.parent
    try:
        if (prefix / "pyvenv.cfg").is_file():
            return _read_virtual_environment(prefix)
        # A link to the interpreter of a conda environment is still that of the environment.
        for candidate in (prefix, python.resolve().parent.parent):
            if (candidate / "conda-meta").is_dir():
                version = _find_version(candidate)
                outside = [*_find_linked_projects(candidate, version), *_find_user_packages(version)]
                return PythonEnvironment(candidate, version, outside=tuple(outside))
    except OSError as e:
        raise ConfigError(
            f"--ship-env: {e.filename}: {e.strerror or e}", fix=f"make it readable, or {_NO_SHIPPING}"
        ) from e
    raise ConfigError(
        f"--ship-env: {python}{f' ({origin})' if origin else ''} is not in a virtual environment or a conda environment"
        + ("" if python.exists() else ", and does not exist on this machine"),
        fix=f"name the Python of an environment with --python, or {_NO_SHIPPING}",
    )


def _read_virtual_environment(prefix: Path) -> PythonEnvironment:
    pairs = (line.partition("=") for line in reading.read_text(prefix / "pyvenv.cfg").splitlines())
    config = {key.strip().lower(): value.strip() for key, _, value in pairs}
    version = _find_version(prefix)
    outside = _find_linked_projects(prefix, version)
    has_system_packages = config.get("include-system-site-packages", "").lower() == "true"
    base_python = _find_base_python(prefix, config, version)
    base = base_python.parent.parent
    if base in _SYSTEM_PREFIXES or _is_incomplete(base, version):
        if base not in _SYSTEM_PREFIXES:
            outside.append(f"{base} (the base interpreter)")
        if has_system_packages:
            outside.append(f"the packages of {base_python}")
        return PythonEnvironment(prefix, version, outside=tuple(outside))
    return PythonEnvironment(prefix, version, base_python, has_system_packages, tuple(outside))


def _find_version(prefix: Path) -> str:
    names = sorted(path.name for path in (prefix / "lib").glob("python3.*") if path.is_dir())
    if not names:
        raise ConfigError(f"--ship-env: {prefix}: lib/python3.* is missing", fix="create the environment again")
    return names[-1]


def _find_base_python(prefix: Path, config: Mapping[str, str], version: str) -> Path:
    python = Path(os.path.realpath(prefix / "bin" / "python"))
    if python.is_relative_to(os.path.realpath(prefix)):  # made with --copies
        python = Path(os.path.realpath(Path(config.get("home", "/usr/bin")) / version))
    return python


def _is_incomplete(base: Path, version: str) -> bool:
    """Return whether an interpreter needs more than its own files: conda's uses libraries of all its packages."""
    return (base / "conda-meta").is_dir() or not (base / "lib" / version / "os.py").is_file()


def _find_linked_projects(prefix: Path, version: str) -> list[str]:
    """Return the folders outside of ``prefix`` that its packages lead to, such as those of editable installs."""
    packages = prefix / "lib" / version / "site-packages"
    folders = [*_read_path_files(packages), *_read_editable_installs(packages)]
    real = [folder for folder in dict.fromkeys(folders) if not folder.is_relative_to(prefix)]
    return [f"{folder} (linked from {packages.name})" for folder in real]


def _read_path_files(packages: Path) -> Iterator[Path]:
    for path in sorted(packages.glob("*.pth")):
        for line in reading.read_bytes(path).decode(errors="replace").splitlines():
            folder = Path(os.path.normpath(packages / line.strip()))
            if line.strip() and not line.startswith(("#", "import ", "import\t")) and folder.is_dir():
                yield folder


def _read_editable_installs(packages: Path) -> Iterator[Path]:
    for path in sorted(packages.glob("*.dist-info/direct_url.json")):
        try:
            document = json.loads(reading.read_bytes(path))
            if document.get("dir_info", {}).get("editable"):
                yield Path(urllib.parse.unquote(urllib.parse.urlsplit(document["url"]).path))
        except (ValueError, LookupError, AttributeError):
            continue


def _find_user_packages(version: str) -> list[str]:
    """Return the user's own packages, which the interpreter of a conda environment finds too."""
    folder = Path(os.environ.get("PYTHONUSERBASE") or Path.home() / ".local") / "lib" / version / "site-packages"
    return [str(folder)] if folder.is_dir() and not os.environ.get("PYTHONNOUSERSITE") else []

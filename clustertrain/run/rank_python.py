"""The Python environment of an attempt's ranks, as a record: version, installed packages and the container's image."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clustertrain import fsio, reading
from clustertrain.run.run_dir import RunDir

_ORIGIN_FILE = "direct_url.json"  # PEP 610: of a package that was installed from a path or a repository


def describe_python(container: str = "") -> dict[str, Any]:
    """Return this process's Python: version, executable, packages, and ``container``, the image that it runs in."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "container": container,
        "packages": list_packages(sys.path),
    }


def list_packages(folders: Sequence[str], names: Collection[str] | None = None) -> dict[str, str]:
    """Return the versions of the packages in ``folders``, of which the first counts, by normalized name.

    With ``names``, only these are returned.

    A package that was installed from a path or a repository has this origin after its version. Only names of folders
    are read, since parsing the metadata of hundreds of packages takes seconds on a network file system.
    """
    packages: dict[str, str] = {}
    for folder in folders:
        for entry in sorted(_list_folder(folder)):
            stem, _, suffix = entry.rpartition(".")
            name, _, version = stem.partition("-")
            key = re.sub(r"[-_.]+", "-", name).lower()  # PEP 503
            is_wanted = names is None or key in names
            if suffix in ("dist-info", "egg-info") and version and is_wanted and key not in packages:
                packages[key] = version.partition("-py")[0] + _find_origin(Path(folder, entry, _ORIGIN_FILE))
    return dict(sorted(packages.items()))


def _list_folder(folder: str) -> list[str]:
    """Return the names in ``folder``; none if it is not a folder (a zip) or cannot be read."""
    try:
        return [entry.name for entry in os.scandir(folder)] if folder else []
    except OSError:
        return []


def _find_origin(path: Path) -> str:
    try:
        document = json.loads(reading.read_text(path))
    except (OSError, ValueError):
        return ""
    if not isinstance(document, dict):
        return ""
    vcs = document.get("vcs_info")
    commit = vcs.get("commit_id") if isinstance(vcs, dict) else None
    return f" from {_without_credentials(str(document.get('url', '')))}" + (f"@{commit}" if commit else "")


def _without_credentials(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def load_newest(run: RunDir) -> dict[str, Any]:
    """Return the record of the newest attempt that has one; empty if there is none."""
    for attempt in reversed(run.attempts()):
        try:
            document = fsio.read_json(attempt.rank_python)
        except (OSError, ValueError):
            continue
        if isinstance(document, dict):
            return document
    return {}

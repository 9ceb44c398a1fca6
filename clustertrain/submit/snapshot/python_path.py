"""Find the user code that a run needs, and its place in the snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clustertrain.errors import ConfigError
from clustertrain.submit.snapshot import code_snapshot


def list_search_folders(folders: Iterable[Path]) -> list[Path]:
    """Return the folders to search for user code: each of ``folders``, its repository's root and the root's ``src``."""
    search_path: list[Path] = []
    for folder in folders:
        root = code_snapshot.find_repository_root(folder)
        search_path += [folder] if root is None else [folder, root, root / "src"]
    return list(dict.fromkeys(search_path))


def find_entry(entry: str, search_path: Iterable[Path]) -> Path | None:
    """Return the file or folder of the package of ``entry`` (``package.module:function``) in ``search_path``.

    The first match wins. None if there is none: the package must then be installed.
    """
    name = entry.partition(":")[0].partition(".")[0]
    for folder in search_path:
        module, package = folder / f"{name}.py", folder / name
        if module.is_file() or package.is_dir():
            return package if package.is_dir() else module
    return None


def find_shared_entry(entries: Mapping[str, str], search_path: Sequence[Path]) -> Path | None:
    """Return a package of ``entries`` (recipe key -> entry) whose snapshot also contains the other packages.

    Raises:
        ConfigError: no single snapshot contains them all.
    """
    paths = {
        key: path for key, entry in entries.items() if entry and (path := find_entry(entry, search_path)) is not None
    }
    for path in paths.values():
        root, package = locate_in_snapshot(path)
        import_path = build_python_path(root, root, package)
        if all(other.parent.resolve() in [s.resolve() for s in import_path] for other in paths.values()):
            return path
    if paths:
        locations = ", ".join(f"{key} in {path.parent}" for key, path in paths.items())
        raise ConfigError(f"one snapshot of the code cannot contain both: {locations}", fix="move them into one folder")
    return None


def locate_in_snapshot(path: Path) -> tuple[Path, str]:
    """Return the folder that a snapshot for ``path`` copies, and ``path`` relative to it."""
    root = code_snapshot.find_snapshot_root(path)
    return root, str((path.parent.resolve() / path.name).relative_to(root))


def build_python_path(code_dir: Path, root: Path, package: str | None) -> list[Path]:
    """Return the folders of the snapshot in ``code_dir`` that go to the front of PYTHONPATH.

    Args:
        root: the folder that is copied, or the copy.
        package: the package of an entry, relative to ``root``; None for a script, whose folder Python adds itself.
    """
    paths = [code_dir, *([code_dir / "src"] if (root / "src").is_dir() else [])]
    package_parent = (code_dir / package).parent if package is not None else code_dir
    return paths if package_parent in paths else [*paths, package_parent]


def build_environment(package_path: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a process that imports ``package_path`` from its current location.

    The order of PYTHONPATH is the same as for the ranks, which import it from the snapshot.
    """
    if package_path is None:
        return dict(environ)
    root, package = locate_in_snapshot(package_path)
    existing = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
    return {**environ, "PYTHONPATH": os.pathsep.join([*map(str, build_python_path(root, root, package)), *existing])}

"""Which code of the user's a run needs, and where it lies in the snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clustertrain.errors import ConfigError
from clustertrain.submit import code_snapshot


def around(folders: Iterable[Path]) -> list[Path]:
    """Where the user's code is looked for: each of ``folders``, the root of its repository and the root's ``src``."""
    found: list[Path] = []
    for folder in folders:
        root = code_snapshot.toplevel(folder)
        found += [folder] if root is None else [folder, root, root / "src"]
    return list(dict.fromkeys(found))


def of_entry(entry: str, places: Iterable[Path]) -> Path | None:
    """The file or folder of the package that ``entry`` (``package.module:function``) names, in the first of ``places``
    that has one. None: it is an installed one, as far as is known."""
    name = entry.partition(":")[0].partition(".")[0]
    for place in places:
        module, package = place / f"{name}.py", place / name
        if module.is_file() or package.is_dir():
            return package if package.is_dir() else module
    return None


def of_entries(entries: Mapping[str, str], places: Sequence[Path]) -> Path | None:
    """:func:`of_entry` of several, by the keys of the recipe: the one beside which Python finds the others too.

    Raises:
        ConfigError: they do not lie where one snapshot has them all.
    """
    found = {key: path for key, entry in entries.items() if entry and (path := of_entry(entry, places)) is not None}
    for path in found.values():
        root, package = place(path)
        searched = python_path(root, root, package)
        if all(other.parent.resolve() in [s.resolve() for s in searched] for other in found.values()):
            return path
    if found:
        where = ", ".join(f"{key} in {path.parent}" for key, path in found.items())
        raise ConfigError(f"one snapshot of the code cannot have both: {where}", fix="keep them in one folder")
    return None


def place(found: Path) -> tuple[Path, str]:
    """The folder that a snapshot for ``found`` copies, and where in it that lies."""
    root = code_snapshot.root_of(found)
    return root, str((found.parent.resolve() / found.name).relative_to(root))


def python_path(code: Path, root: Path, package: str | None) -> list[Path]:
    """What of the snapshot in ``code`` goes to the front of PYTHONPATH.

    Args:
        root: the folder that is copied, or the copy.
        package: that of an entry, relative to ``root``; a script's own folder Python adds by itself.
    """
    wanted = [code, *([code / "src"] if (root / "src").is_dir() else [])]
    beside = (code / package).parent if package is not None else code
    return wanted if beside in wanted else [*wanted, beside]


def environment_in_place(found: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a process that imports the package ``found`` from where it lies, as job.sh's ranks do from the
    snapshot."""
    if found is None:
        return dict(environ)
    root, package = place(found)
    before = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
    return {**environ, "PYTHONPATH": os.pathsep.join([*map(str, python_path(root, root, package)), *before])}

"""Files of a text corpus."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from pathlib import Path, PurePath

from clustertrain.config.data import DataSpec
from clustertrain.errors import ConfigError

STDLIB = "stdlib"
_EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__"})


def list_files(spec: DataSpec) -> list[Path]:
    """Return the files of the corpus, sorted by path relative to its folder, independent of the file system's order.

    Raises:
        ConfigError: the path is missing, or no file in it matches the pattern.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if spec.path in ("", STDLIB) else Path(spec.path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(
            f"data.path = {spec.path!r}: no such file or folder", fix="use a path that every node can read"
        )
    matches: list[str] = []
    for folder, subfolders, names in os.walk(root):
        # Prune while walking: site-packages, in the standard library's folder, can be larger than the library itself.
        subfolders[:] = [n for n in subfolders if n not in _EXCLUDED_DIRS]
        if "/" in spec.pattern:
            matched = [n for n in names if PurePath(folder, n).match(spec.pattern)]
        else:  # the same result in a tenth of the time
            matched = fnmatch.filter(names, spec.pattern)
        matches += [f"{folder}/{n}" for n in matched]
    if not matches:
        raise ConfigError(
            f"data.path = {spec.path!r}: no file matches data.pattern = {spec.pattern!r}",
            fix="set data.pattern to the names of its text files, such as '*.txt'",
        )
    return [Path(p) for p in sorted(matches)]  # all start with root, which thus does not affect the order

"""The files of a corpus of text."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from clustertrain.config.data import DataSpec
from clustertrain.errors import ConfigError

STDLIB = "stdlib"
_EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__"})


def list_files(spec: DataSpec) -> list[Path]:
    """The files of the corpus, sorted by their path relative to its folder: no filesystem's own order.

    Raises:
        ConfigError: the path is missing or nothing in it fits the pattern.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if spec.path in ("", STDLIB) else Path(spec.path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(f"data.path = {spec.path!r}: no such file or folder", fix="every node must see it")
    matches: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Pruned while walking: a site-packages below the standard library can be larger than all of it.
        subfolders[:] = [n for n in subfolders if n not in _EXCLUDED_DIRS]
        matches += [p for n in names if (p := Path(folder, n)).match(spec.pattern)]
    if not matches:
        raise ConfigError(f"data.path = {spec.path!r}: no file fits data.pattern = {spec.pattern!r}")
    return sorted(matches, key=lambda p: p.relative_to(root).as_posix())

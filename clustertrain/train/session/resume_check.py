"""Whether a run goes on as it began: how a checkpoint was made, against how this process was started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import machinery
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from clustertrain import schema
from clustertrain.checkpoint.load.restore import Made
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext

_SHOWN = 3  # names of files


def differences(made: Made, context: RankContext, now: Mapping[str, Any]) -> list[str]:
    """In words what is not as it was, of layout, ranks, precision, code and versions. The data's version is the
    loader's affair, which refuses another one always.

    ``now``: what this process says of itself, as a checkpoint's ``about``.
    """
    found = []
    if made.world_size != context.world_size:
        found.append(f"{made.world_size} ranks then, {context.world_size} now")
    layout = {f: getattr(context.layout, f) for f in context.layout.__struct_fields__}
    other = [name for name, value in layout.items() if made.layout.get(name) != value]
    if other:
        sizes = ", ".join(f"{name} {made.layout.get(name)} -> {layout[name]}" for name in other)
        found.append(f"layout {_words(made.layout)} then, {_words(layout)} now ({sizes})")
    if made.torch != str(torch.__version__):
        found.append(f"torch {made.torch} then, {torch.__version__} now")
    for name in ("clustertrain", "python", "precision"):
        before = made.about.get(name)
        if before is not None and before != now.get(name):
            found.append(f"{name} {before} then, {now.get(name)} now")
    before, after = _code(made.about.get("git")), _code(now.get("git"))
    if before and before != after:
        found.append(f"code {before} then, {after or 'not known'} now")
    return found + changed_files(made.about.get("code"), now.get("code"))


def of_all(everybody: Sequence[tuple[str, Sequence[str]] | None]) -> list[str]:
    """What the ranks have found, each thing once: with the nodes and ranks that have, where not all do.

    Args:
        everybody: of each rank its node and what it has found; None: nothing.
    """
    ranks: dict[str, list[int]] = {}
    for rank, told in enumerate(everybody):
        for words in told[1] if told is not None else ():
            ranks.setdefault(words, []).append(rank)
    found = []
    for words, having in ranks.items():
        nodes = dict.fromkeys(told[0] for told in map(everybody.__getitem__, having) if told is not None)
        where = f" (node {', '.join(nodes)}; rank {', '.join(map(str, having))})"
        found.append(words if len(having) == len(everybody) else words + where)
    return found


def files_of(code: Path) -> dict[str, str]:
    """By name a checksum of each file of a run's ``code/``, without what Python leaves there when it imports."""
    found = {}
    for folder, folders, files in os.walk(code):
        links = [f for f in folders if Path(folder, f).is_symlink()]
        folders[:] = [f for f in folders if f != "__pycache__"]
        for name in [*files, *links]:
            path = Path(folder, name)
            found[str(path.relative_to(code))] = _checksum(path)
    return found


def _checksum(path: Path) -> str:
    try:
        return xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.is_file() else str(path.readlink())
    except OSError as e:
        return e.strerror or str(e)


def changed_files(before: Any, now: Any) -> list[str]:
    """A file that was not there before counts where Python could import it; others a script may have written."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):  # no exact resume then, or not this rank's part
        return []
    new = [name for name in now if name not in before and name.endswith(tuple(machinery.all_suffixes()))]
    names = sorted([*(name for name, checksum in before.items() if now.get(name) != checksum), *new])
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"code/ of the run was changed: {', '.join(names[:_SHOWN])}{more}"]


def _words(layout: Mapping[str, Any]) -> str:
    try:
        return schema.convert(dict(layout), Layout).words()
    except msgspec.ValidationError:  # of another version
        return str(layout.get("strategy"))


def _code(git: Any) -> str:
    """The commit, and a checksum of what was changed since."""
    if not isinstance(git, Mapping):
        return ""
    diff = str(git.get("diff") or "")
    changed = f" with changes {xxhash.xxh3_64_hexdigest(diff.encode())[:8]}" if diff else ""
    return f"commit {str(git.get('commit'))[:12]}{changed}"

"""Comparison of the conditions of this process with those when a checkpoint was saved (``contract.resume``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import machinery
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from clustertrain import schema
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.load.restore import CheckpointOrigin
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext

log = logging.getLogger(__name__)

_MAX_LISTED_FILES = 3


def is_exact_resume(context: RankContext) -> bool:
    """Return whether the run may resume only under the same conditions."""
    return context.spec is not None and context.spec.recipe.contract.resume == "exact"


def check_origin(origin: CheckpointOrigin, context: RankContext, current: Mapping[str, Any], ranks: Ranks) -> None:
    """Compare ``origin`` with this process on every rank, since nodes may differ. Collective.

    ``current`` is what the checkpoints of this attempt record as ``about``. If there are differences and the resume
    need not be exact, rank 0 logs a warning.

    Raises:
        ConfigError: on all ranks, if any rank has differences and the resume must be exact.
    """
    local_differences = find_differences(origin, context, current)
    gathered = ranks.all_gather_optional((context.node, local_differences) if local_differences else None)
    differences = merge_differences(gathered)
    if not differences:
        return
    if is_exact_resume(context):
        raise ConfigError(
            f"contract.resume = 'exact', but the checkpoint was saved under other conditions: {'; '.join(differences)}",
            fix="restore those conditions, or start a new run with contract.resume = 'elastic'",
        )
    if context.rank == 0:
        log.warning("the run continues under other conditions: %s", "; ".join(differences))


def find_differences(origin: CheckpointOrigin, context: RankContext, current: Mapping[str, Any]) -> list[str]:
    """Return one message per difference in layout, ranks, precision, code and versions.

    The version of the data is not compared here, since the loader always refuses a different one. For ``current``, see
    :func:`check_origin`.
    """
    messages = []
    if origin.world_size != context.world_size:
        messages.append(f"{origin.world_size} ranks then, {context.world_size} now")
    layout = {f: getattr(context.layout, f) for f in context.layout.__struct_fields__}
    changed = [name for name, value in layout.items() if origin.layout.get(name) != value]
    if changed:
        sizes = ", ".join(f"{name} {origin.layout.get(name)} -> {layout[name]}" for name in changed)
        messages.append(f"layout {_format_layout(origin.layout)} then, {_format_layout(layout)} now ({sizes})")
    if origin.torch != str(torch.__version__):
        messages.append(f"torch {origin.torch} then, {torch.__version__} now")
    for name in ("clustertrain", "python", "precision"):
        before = origin.about.get(name)
        if before is not None and before != current.get(name):
            messages.append(f"{name} {before} then, {current.get(name)} now")
    messages += _compare_adapters(origin.about.get("adapter"), current.get("adapter"))
    before, after = _format_code_version(origin.about.get("git")), _format_code_version(current.get("git"))
    if before and before != after:
        messages.append(f"code {before} then, {after or 'unknown'} now")
    return messages + find_changed_files(origin.about.get("code"), current.get("code"))


def _compare_adapters(before: Any, current: Any) -> list[str]:
    """Return a message per setting of the adapters that changes what they compute."""
    then, now = (about.get("spec") if isinstance(about, dict) else None for about in (before, current))
    if not isinstance(then, dict) or not isinstance(now, dict):
        return []
    keys = ("kind", "rank", "alpha", "rank_stabilized", "dropout", "base_precision", "target_modules")
    return [f"adapter {key} {then.get(key)} then, {now[key]} now" for key in keys if then.get(key) != now[key]]


def merge_differences(by_rank: Sequence[tuple[str, Sequence[str]] | None]) -> list[str]:
    """Return each difference once, with the nodes and ranks that have it unless all ranks do.

    Args:
        by_rank: (node, differences) of each rank; None for a rank without differences.
    """
    ranks: dict[str, list[int]] = {}
    for rank, entry in enumerate(by_rank):
        for message in entry[1] if entry is not None else ():
            ranks.setdefault(message, []).append(rank)
    merged = []
    for message, affected in ranks.items():
        nodes = dict.fromkeys(entry[0] for entry in map(by_rank.__getitem__, affected) if entry is not None)
        location = f" (node {', '.join(nodes)}; rank {', '.join(map(str, affected))})"
        merged.append(message if len(affected) == len(by_rank) else message + location)
    return merged


def checksum_files(code: Path) -> dict[str, str]:
    """Return a checksum for each file in a run's ``code/``, except ``__pycache__``."""
    checksums = {}
    for folder, folders, files in os.walk(code):
        links = [f for f in folders if Path(folder, f).is_symlink()]
        folders[:] = [f for f in folders if f != "__pycache__"]
        for name in [*files, *links]:
            path = Path(folder, name)
            checksums[str(path.relative_to(code))] = _checksum(path)
    return checksums


def _checksum(path: Path) -> str:
    try:
        return xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.is_file() else str(path.readlink())
    except OSError as e:
        return e.strerror or str(e)


def find_changed_files(before: Any, current: Any) -> list[str]:
    """Return one message that lists the files that changed, or an empty list.

    A new file counts only if Python could import it, since the script may write other files itself.
    """
    if not isinstance(before, Mapping) or not isinstance(current, Mapping):  # not recorded, or not read by this rank
        return []
    added = [name for name in current if name not in before and name.endswith(tuple(machinery.all_suffixes()))]
    names = sorted([*(name for name, checksum in before.items() if current.get(name) != checksum), *added])
    if not names:
        return []
    suffix = f" and {len(names) - _MAX_LISTED_FILES} more" if len(names) > _MAX_LISTED_FILES else ""
    return [f"code/ of the run was changed: {', '.join(names[:_MAX_LISTED_FILES])}{suffix}"]


def _format_layout(layout: Mapping[str, Any]) -> str:
    try:
        return schema.convert(dict(layout), Layout).describe()
    except msgspec.ValidationError:  # written by another version
        return str(layout.get("strategy"))


def _format_code_version(git: Any) -> str:
    """Return the commit and, if there are uncommitted changes, their checksum."""
    if not isinstance(git, Mapping):
        return ""
    diff = str(git.get("diff") or "")
    changed = f" with changes {xxhash.xxh3_64_hexdigest(diff.encode())[:8]}" if diff else ""
    return f"commit {str(git.get('commit'))[:12]}{changed}"

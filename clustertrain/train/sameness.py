"""Whether a run goes on as it began: how a checkpoint was made, against how this process was started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import xxhash

from clustertrain.checkpoint.manager import Made
from clustertrain.plan.layout import Layout
from clustertrain.train.context import RankContext


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
    return found


def _words(layout: Mapping[str, Any]) -> str:
    try:
        return msgspec.convert(dict(layout), Layout).words()
    except msgspec.ValidationError:  # of another version
        return str(layout.get("strategy"))


def _code(git: Any) -> str:
    """The commit, and a checksum of what was changed since."""
    if not isinstance(git, Mapping):
        return ""
    diff = str(git.get("diff") or "")
    changed = f" with changes {xxhash.xxh3_64_hexdigest(diff.encode())[:8]}" if diff else ""
    return f"commit {str(git.get('commit'))[:12]}{changed}"

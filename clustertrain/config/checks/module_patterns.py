"""Patterns of module names: ``optim.freeze``, ``optim.lr_scale`` and other keys of that kind use them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import accumulate

from clustertrain.config.parsing.documents import find_near


def enclosing_modules(module: str) -> list[str]:
    """Return the names of ``module`` and of the modules that contain it, outermost first."""
    return list(accumulate(module.split("."), "{}.{}".format))


def matches(pattern: str, module: str) -> bool:
    """Return whether ``pattern`` matches ``module`` or a module that contains it; ``*`` also matches dots."""
    return any(fnmatchcase(name, pattern) for name in enclosing_modules(module))


def suggest_modules(pattern: str, modules: Iterable[str]) -> str:
    """Return a sentence that lists the modules with similar names, or the top-level modules if there are none."""
    candidates = sorted({name for module in modules for name in enclosing_modules(module)} - {""})
    near = find_near(pattern, candidates)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"top-level modules: {', '.join(n for n in candidates if '.' not in n)}"


def list_patterns(modules: Iterable[str], limit: int = 16) -> str:
    """Return a sentence with the names of ``modules``, in which numbers are replaced by ``*``."""
    patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules))
    more = f" and {len(patterns) - limit} more" if len(patterns) > limit else ""
    return f"its Linear layers are {', '.join(patterns[:limit])}{more}"

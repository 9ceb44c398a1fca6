"""Patterns of module names, as ``optim.freeze`` and ``optim.lr_scale`` have them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import accumulate


def enclosing_modules(module: str) -> list[str]:
    """The module's name and those of the modules around it, outermost first."""
    return list(accumulate(module.split("."), "{}.{}".format))


def matches(pattern: str, module: str) -> bool:
    """Whether ``pattern`` fits the name of ``module`` or of one around it; a ``*`` stands for dots too."""
    return any(fnmatchcase(name, pattern) for name in enclosing_modules(module))


def suggest_modules(pattern: str, modules: Iterable[str]) -> str:
    """A sentence that names the modules with the nearest names, else those at the top."""
    candidates = sorted({name for module in modules for name in enclosing_modules(module)} - {""})
    close = difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"at the top there are {', '.join(n for n in candidates if '.' not in n)}"

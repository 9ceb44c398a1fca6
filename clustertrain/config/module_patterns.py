"""Patterns of module names, as ``optim.freeze`` and ``optim.lr_scale`` have them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import accumulate


def around(module: str) -> list[str]:
    """The module's name and those of the modules around it, outermost first."""
    return list(accumulate(module.split("."), "{}.{}".format))


def fits(pattern: str, module: str) -> bool:
    """Whether ``pattern`` fits the name of ``module`` or of one around it; a ``*`` stands for dots too."""
    return any(fnmatchcase(name, pattern) for name in around(module))


def near(pattern: str, modules: Iterable[str]) -> str:
    """A sentence that names the modules with the nearest names, else those at the top."""
    known = sorted({name for module in modules for name in around(module)} - {""})
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"at the top there are {', '.join(n for n in known if '.' not in n)}"

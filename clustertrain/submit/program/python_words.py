"""The command line of Python: its own options, and the script or module that it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_VALUED = "WX"
_VALUED_LONG = frozenset({"--check-hash-based-pycs"})


@dataclass(frozen=True)
class PythonProgram:
    """What an interpreter runs."""

    kind: Literal["script", "module", "code", "none"]
    """``none``: standard input, or the interactive interpreter."""
    index: int
    """Of the word that names it; the arguments follow."""
    module: str = ""
    options: tuple[str, ...] = ()
    """Of the interpreter, without ``-m`` and ``-c``."""


def is_python(program: str) -> bool:
    """Return whether a word names a Python interpreter."""
    return _PYTHON.fullmatch(PurePath(program).name) is not None


def find_python_program(words: Sequence[str]) -> PythonProgram:
    """Return what the Python at the start of ``words`` runs. Options may be joined (``-Om MODULE``, ``-mMODULE``)."""
    options: list[str] = []
    index = 1
    while index < len(words):
        word = words[index]
        if word == "--":
            index += 1
            break
        if word == "-" or not word.startswith("-"):
            break
        if word.startswith("--"):
            count = 2 if word in _VALUED_LONG else 1
        else:
            at = next((i for i, letter in enumerate(word) if letter in f"cm{_VALUED}"), None)
            if at is not None and word[at] in "cm":
                options += [word[:at]] if at > 1 else []
                index += 0 if word[at + 1 :] else 1
                module = (word[at + 1 :] or "".join(words[index : index + 1])) if word[at] == "m" else ""
                kind: Literal["module", "code"] = "module" if word[at] == "m" else "code"
                is_complete = index < len(words)
                return PythonProgram(kind if is_complete else "none", index, module, tuple(options))
            count = 2 if at == len(word) - 1 else 1
        options += words[index : index + count]
        index += count
    is_script = index < len(words) and words[index] != "-"
    return PythonProgram("script" if is_script else "none", index, options=tuple(options))

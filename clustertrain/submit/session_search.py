"""Whether a script opens a session: its own text, and the modules of the user's code that it imports.

The text is searched, and nothing is imported. A module that is named at run time only is not found. A session that it
opens works in a command too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from clustertrain import reading
from clustertrain.submit import python_path

_WORD = "clustertrain"
MAX_MODULES = 2000


def find_use(script: Path) -> Path | None:
    """Return the file that names clustertrain: the script or a module that it imports; None if there is none.

    One with ``ct.attach`` or the callbacks does not count: they belong to commands.
    """
    search_path = python_path.list_search_folders([script.parent])
    seen: set[Path] = set()
    waiting = [script.resolve()]
    while waiting and len(seen) < MAX_MODULES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = _read(path)
        if _WORD in text and not _uses_only_command_parts(text):
            return path
        waiting += _list_imported(path, text, search_path)
    return None


def _uses_only_command_parts(text: str) -> bool:
    """Return whether ``text`` uses what works in a command alone: ``attach`` or the callbacks, and no session."""
    return re.search(r"\b(attach|integrations)\b", text) is not None and re.search(r"[Ss]ession", text) is None


def _read(path: Path) -> str:
    try:
        return reading.read_bytes(path).decode(errors="replace")
    except OSError:
        return ""


def _list_imported(path: Path, text: str, search_path: list[Path]) -> Iterator[Path]:
    """Yield the user's files that ``path`` imports, or names as in ``exec(open("config.py").read())``."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _locate(alias.name, search_path)
        elif isinstance(node, ast.ImportFrom):
            folders = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else search_path
            module = node.module or ""
            for alias in node.names:  # a name of the module, or a module of the package
                yield from _locate(f"{module}.{alias.name}".lstrip("."), folders)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            yield from (p.resolve() for folder in search_path if _is_file(p := folder / node.value))


def _locate(module: str, folders: list[Path]) -> Iterator[Path]:
    """Yield the files of a module and of the packages that contain it, as far as they exist in ``folders``."""
    for folder in folders:
        at, found = folder, False
        for part in module.split("."):
            at /= part
            for file in (at / "__init__.py", at.with_name(f"{at.name}.py")):
                if _is_file(file):
                    found = True
                    yield file.resolve()
        if found:
            return


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a NUL character
        return False

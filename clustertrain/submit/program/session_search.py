"""Whether a script opens a session: by what it imports of clustertrain, and the modules of the user's that it imports.

The files are parsed, and nothing is imported. A module that is named at run time only is not found. A session that it
opens works in a command too.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clustertrain import reading
from clustertrain.submit.snapshot import python_path

_WORD = "clustertrain"
# What works in a command, without a session.
_COMMAND_PARTS = frozenset({"Job", "__version__", "attach", "integrations"})
_UNKNOWN = ""  # a use of the whole module
MAX_MODULES = 2000


@dataclass(frozen=True)
class SessionUse:
    """Which file of a script's needs a session."""

    path: Path | None
    """The script or a module that it imports; None if none needs a session."""
    unparsed: str = ""
    """The first file that this Python cannot parse, the line and why: its text was searched instead."""


def find_use(script: Path) -> SessionUse:
    """Return the file that uses a session of clustertrain.

    One with ``ct.attach`` or the callbacks alone does not: they belong to commands.
    """
    search_path = python_path.list_search_folders([script.parent])
    seen: set[Path] = set()
    waiting = [script.resolve()]
    unparsed = ""
    while waiting and len(seen) < MAX_MODULES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        content = _read(path)
        try:
            nodes = _parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            unparsed = unparsed or _describe(path, e)
            if _mentions_session(content.decode(errors="replace")):
                return SessionUse(path, unparsed)
            continue
        if _list_used(nodes) - _COMMAND_PARTS:
            return SessionUse(path, unparsed)
        waiting += _list_imported(path, nodes, search_path)
    return SessionUse(None, unparsed)


def _read(path: Path) -> bytes:
    try:
        return reading.read_bytes(path)
    except OSError:
        return b""


def _parse(content: bytes) -> list[ast.AST]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the user's code, such as an invalid escape
        return list(ast.walk(ast.parse(content)))


def _describe(path: Path, error: Exception) -> str:
    line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    reason = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{path}{line} is not valid for Python {version}, which runs clustertrain: {reason}"


def _mentions_session(text: str) -> bool:
    """Return whether the text of a file that cannot be parsed names clustertrain for more than commands have."""
    has_part = re.search(r"\b(attach|integrations)\b", text) is not None
    return _WORD in text and not (has_part and re.search(r"[Ss]ession", text) is None)


def _list_used(nodes: list[ast.AST]) -> set[str]:
    """Return the names of clustertrain that a file uses; with :data:`_UNKNOWN` if it uses the module in another way."""
    used: set[str] = set()
    modules: set[str] = set()  # names that the module has in the file
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, part = alias.name.partition(".")
                if package == _WORD:
                    used |= {part.partition(".")[0]} if part else set()
                    modules |= {alias.asname or _WORD} if not part or not alias.asname else set()
        elif isinstance(node, ast.ImportFrom) and not node.level:
            package, _, part = (node.module or "").partition(".")
            if package == _WORD:
                used |= {part.partition(".")[0]} if part else {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and (name := _find_imported(node)):
            used |= {name.split(".")[1]} if "." in name else set()
        elif isinstance(node, ast.Assign) and _find_imported(node.value) == _WORD:
            modules |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    imports_module = bool(modules) or any(_find_imported(node) == _WORD for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_module(node.value, modules):
            used.add(node.attr)
        elif isinstance(node, ast.Call) and any(_is_module(argument, modules) for argument in node.args):
            used.add(_UNKNOWN)  # getattr(ct, name)
    return used or ({_UNKNOWN} if imports_module else set())


def _find_imported(node: ast.AST) -> str:
    """Return the module of clustertrain that ``import_module("…")`` or ``__import__("…")`` imports; otherwise empty."""
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    function, name = node.func, node.args[0]
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called not in ("import_module", "__import__") or not isinstance(name, ast.Constant):
        return ""
    return name.value if isinstance(name.value, str) and name.value.split(".")[0] == _WORD else ""


def _is_module(node: ast.AST, modules: set[str]) -> bool:
    return (isinstance(node, ast.Name) and node.id in modules) or _find_imported(node) == _WORD


def _list_imported(path: Path, nodes: list[ast.AST], search_path: list[Path]) -> Iterator[Path]:
    """Yield the user's files that ``path`` imports, or names as in ``exec(open("config.py").read())``."""
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

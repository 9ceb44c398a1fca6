"""Functions of the user's own that a recipe names, looked for before the queue. None of the user's code is run."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from clustertrain.config.parsing import nearest
from clustertrain.errors import ConfigError
from clustertrain.submit import code_snapshot, python_path
from clustertrain.submit.request import Prepared

_AT_RUN_TIME = frozenset({"globals", "exec"})  # what gives a module names that are nowhere written


def check(prepared: Prepared) -> list[str]:
    """Notes on entries whose modules only the job's Python could tell of.

    Raises:
        ConfigError: a module that is not there, or is no Python; a function that it does not have.
    """
    recipe = prepared.spec.recipe
    notes = []
    for key, entry in (("model.entry", recipe.model.entry), ("data.entry", recipe.data.entry)):
        if not entry:
            continue
        said = f"{key} = {entry!r}"
        module, _, path = entry.partition(":")
        taken = _taken(prepared)
        found = _module(module, [*taken, *_asked_for(prepared)])
        same = prepared.python == sys.executable
        if found is not None:
            _check_name(said, module, found, path.partition(".")[0], same=same)
            if PathFinder.find_spec(module.partition(".")[0], taken) is not None:
                _check_taken(said, Path(found.origin or ""), prepared)
        elif same and not prepared.profile.setup:
            raise ConfigError(
                f"{said}: no module {module!r} in {', '.join(map(str, prepared.searched))}, nor is one installed for "
                f"{prepared.python}",
                fix="keep it beside the recipe or where submit is called, or install it for the job's Python",
            )
        else:
            notes.append(
                f"{said}: no module {module!r} is here, so {prepared.python} of the job must have it installed"
            )
    return notes


def _taken(prepared: Prepared) -> list[str]:
    """Folders whose snapshot comes before all else."""
    if prepared.code is None:
        return []
    root, package = python_path.place(prepared.code)
    return [str(folder) for folder in python_path.python_path(root, root, package)]


def _asked_for(prepared: Prepared) -> list[str]:
    """What comes before the packages that are installed."""
    return [folder for folder in prepared.spec.env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _check_taken(said: str, file: Path, prepared: Prepared) -> None:
    """Raises ConfigError where the snapshot will lack ``file``."""
    if prepared.code is not None and file.resolve() != prepared.code.resolve() and code_snapshot.ignored(file):
        raise ConfigError(
            f"{said}: git ignores {file}, so the snapshot of the code would lack it", fix="take it out of .gitignore"
        )


def _module(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """As an import finds it, which would run the packages around it."""
    importlib.invalidate_caches()
    top, *inner = name.split(".")
    try:
        found = PathFinder.find_spec(top, folders) or importlib.util.find_spec(top)
    except ValueError:  # of what is already imported and came from no file
        return None
    for part in inner:
        if found is None or found.submodule_search_locations is None:
            return None
        found = PathFinder.find_spec(f"{found.name}.{part}", list(found.submodule_search_locations))
    return found


def _check_name(said: str, module: str, found: ModuleSpec, name: str, *, same: bool) -> None:
    """Raises ConfigError where ``module`` does not have ``name``, or is no Python; ``same``: that of the job is this
    one."""
    if found.origin is None:  # a folder without __init__.py
        where = next(iter(found.submodule_search_locations or ()), module)
        raise ConfigError(f"{said}: {where} is a folder of modules", fix="name the module in it that has the function")
    if not found.origin.endswith(".py"):
        return
    try:
        names = set(_names(ast.parse(Path(found.origin).read_bytes(), found.origin)))
    except (SyntaxError, ValueError) as e:
        if not same:
            return
        raise ConfigError(f"{said}: {found.origin} is not Python: {e}", fix="mend it") from e
    if name not in names and not names & {"*", "__getattr__"}:
        raise ConfigError(
            f"{said}: {found.origin} has no {name!r}",
            fix=nearest(name, sorted(names)) if names else f"write a function {name} into it",
        )


def _names(tree: ast.Module) -> Iterator[str]:
    """What a module defines at its top; ``*`` where that cannot be told."""
    nodes: list[ast.AST] = [*tree.body]
    while nodes:
        match nodes.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case node:
                nodes += ast.iter_child_nodes(node)
    if any(isinstance(node, ast.Name) and node.id in _AT_RUN_TIME for node in ast.walk(tree)):
        yield "*"

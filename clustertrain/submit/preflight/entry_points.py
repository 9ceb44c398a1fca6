"""Checks, before submission, of the user functions that a recipe names. No user code is run."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.snapshot import code_snapshot, python_path

_DYNAMIC_NAMES = frozenset({"globals", "exec"})  # they define names that the source does not show


def check_entries(prepared: PreparedRun) -> list[str]:
    """Return notes on entries whose modules only the job's Python can find.

    Raises:
        ConfigError: a module does not exist or is not Python, or lacks the function.
    """
    recipe, python = prepared.spec.recipe, prepared.python.ranks.path
    notes = []
    for key, entry in (("model.entry", recipe.model.entry), ("data.entry", recipe.data.entry)):
        if not entry:
            continue
        label = f"{key} = {entry!r}"
        module, _, path = entry.partition(":")
        snapshot_folders = _list_snapshot_folders(prepared)
        module_spec = _find_module(module, [*snapshot_folders, *_list_env_python_path(prepared)])
        is_same_python = python == sys.executable
        if module_spec is not None:
            _check_function(label, module, module_spec, path.partition(".")[0], is_same_python=is_same_python)
            if PathFinder.find_spec(module.partition(".")[0], snapshot_folders) is not None:
                _check_in_snapshot(label, Path(module_spec.origin or ""), prepared)
        elif is_same_python and not prepared.profile.setup:
            raise ConfigError(
                f"{label}: no module {module!r} in {', '.join(map(str, prepared.search_path))}, and none is installed"
                f" for {python}",
                fix="move it next to the recipe or to the current folder, or install it for the job's Python",
            )
        else:
            notes.append(f"{label}: no module {module!r} here; it must be installed for the job's {python}")
    return notes


def _list_snapshot_folders(prepared: PreparedRun) -> list[str]:
    """Return the folders that the snapshot puts first on the job's import path."""
    if prepared.code is None:
        return []
    root, package = python_path.locate_in_snapshot(prepared.code)
    return [str(folder) for folder in python_path.build_python_path(root, root, package)]


def _list_env_python_path(prepared: PreparedRun) -> list[str]:
    """Return the folders of PYTHONPATH in ``[env]``, which come before installed packages."""
    return [folder for folder in prepared.spec.env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _check_in_snapshot(label: str, file: Path, prepared: PreparedRun) -> None:
    """Raise ConfigError if the snapshot will lack ``file``."""
    if prepared.code is not None and file.resolve() != prepared.code.resolve() and code_snapshot.is_git_ignored(file):
        raise ConfigError(
            f"{label}: git ignores {file}, so the snapshot of the code would lack it", fix="remove it from .gitignore"
        )


def _find_module(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Return the spec that an import would use, without running the parent packages."""
    importlib.invalidate_caches()
    top, *inner = name.split(".")
    try:
        module_spec = PathFinder.find_spec(top, folders) or importlib.util.find_spec(top)
    except ValueError:  # an imported module without a file
        return None
    for submodule in inner:
        if module_spec is None or module_spec.submodule_search_locations is None:
            return None
        module_spec = PathFinder.find_spec(
            f"{module_spec.name}.{submodule}", list(module_spec.submodule_search_locations)
        )
    return module_spec


def _check_function(label: str, module: str, module_spec: ModuleSpec, name: str, *, is_same_python: bool) -> None:
    """Raise ConfigError if ``module`` lacks ``name`` or is not Python; with another Python its syntax may be valid."""
    if module_spec.origin is None:  # a folder without __init__.py
        location = next(iter(module_spec.submodule_search_locations or ()), module)
        raise ConfigError(
            f"{label}: {location} is a folder of modules", fix="name the module in it that defines the function"
        )
    if not module_spec.origin.endswith(".py"):
        return
    try:
        names = set(_iter_defined_names(ast.parse(Path(module_spec.origin).read_bytes(), module_spec.origin)))
    except (SyntaxError, ValueError) as e:
        if not is_same_python:
            return
        raise ConfigError(f"{label}: {module_spec.origin} is not Python: {e}", fix="fix the syntax error") from e
    if name not in names and not names & {"*", "__getattr__"}:
        raise ConfigError(
            f"{label}: {module_spec.origin} has no {name!r}",
            fix=did_you_mean(name, sorted(names)) if names else f"define a function {name} in it",
        )


def _iter_defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines at top level; ``*`` if it may define others."""
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
    if any(isinstance(node, ast.Name) and node.id in _DYNAMIC_NAMES for node in ast.walk(tree)):
        yield "*"

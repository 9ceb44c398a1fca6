"""Phase 1, parse: merge the target, ``--set`` and ``--grid`` into one typed recipe."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from clustertrain.config.checks import adapter_checks, epochs, unused_keys
from clustertrain.config.checks.unused_keys import KeyCondition
from clustertrain.config.job import JobSpec, ScriptSpec
from clustertrain.config.parsing import presets
from clustertrain.config.parsing.documents import build, load_toml, parse_assignment, parse_value, set_value_at
from clustertrain.config.parsing.dotted_keys import split_key, type_at
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.submit import start_weights
from clustertrain.submit.program import command
from clustertrain.submit.request import SubmitRequest


class RecipeFile(Recipe, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a recipe file may contain: a :class:`Recipe`, ``[job]`` and ``[env]``."""

    job: JobSpec = JobSpec()
    env: dict[str, str] = {}  # noqa: RUF012 - msgspec copies an empty default


@dataclass(frozen=True)
class ParsedRecipe:
    request: SubmitRequest
    name: str
    """Default name of the run."""
    script: ScriptSpec | None
    file_document: Mapping[str, Any]
    """Tables of the recipe file; empty for a script and for the default preset."""
    overrides: Mapping[str, Any]
    """Values of ``--set`` and ``--grid``."""
    document: Mapping[str, Any]
    """The recipe file with the overrides."""

    @property
    def source(self) -> str:
        """Name of the recipe in error messages."""
        return self.request.target if self.script is None and self.request.target else "--set"

    @cached_property
    def values(self) -> RecipeFile:
        """The typed values.

        Raises:
            ConfigError: a key is unknown, a value has the wrong type or is out of range, or tables contradict each
                other.
        """
        return _build_values(self.document, self.source, self.request.cwd)

    @cached_property
    def file_values(self) -> RecipeFile | None:
        """The typed values of the file without the overrides; None if the file alone is invalid."""
        if not self.overrides:
            return self.values
        try:
            return _build_values(self.file_document, self.request.target, self.request.cwd)
        except ConfigError:
            return None

    @property
    def recipe(self) -> Recipe:
        """The typed recipe without ``[job]`` and ``[env]``."""
        return Recipe(**{name: getattr(self.values, name) for name in Recipe.__struct_fields__})

    @cached_property
    def unused(self) -> dict[str, KeyCondition]:
        """Keys that have no effect on this recipe, each with the condition that it fails."""
        return unused_keys.find_unused_keys(self.document, self.values)

    @cached_property
    def override_keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in unused_keys.iter_keys(self.overrides))


def parse_recipe(request: SubmitRequest) -> ParsedRecipe:
    """Load the target and apply the overrides. Values are converted to their types when they are first read.

    Raises:
        ConfigError: the recipe is not TOML, or an override is not of the form KEY.PATH=VALUE.
    """
    file_document, script, name = _load_target(request)
    document, overrides = copy.deepcopy(file_document), dict[str, Any]()
    assigned = _list_overrides(request)
    for path, _ in assigned:
        _remove_alternatives(document, path)
    for path, value in assigned:
        set_value_at(document, path, value)
        set_value_at(overrides, path, copy.deepcopy(value))
    return ParsedRecipe(request, name, script, file_document, overrides, document)


def _remove_alternatives(document: dict[str, Any], assigned: str) -> None:
    """Remove the keys of the file that set the same quantity as ``assigned``: ``--set`` wins over the file."""
    for group in epochs.ALTERNATIVES:
        for key in epochs.find_alternatives(document, group) if assigned in group else ():
            table, _, name = key.partition(".")
            del document[table][name]


def is_integer_key(key: str) -> bool:
    """Return whether the value of a recipe at ``key`` is an integer."""
    return type_at(RecipeFile, split_key(key)) in (int, int | str)


def is_recipe_path(path: Path) -> bool:
    return path.suffix == ".toml"


def _load_target(request: SubmitRequest) -> tuple[dict[str, Any], ScriptSpec | None, str]:
    if request.command:
        script = command.build_script_spec(request)
        return {}, script, PurePath(script.path or request.command[0]).stem
    if not request.target:
        return {}, None, "default"
    path = request.cwd / request.target
    if is_recipe_path(path):
        return load_toml(path), None, path.stem
    return {}, ScriptSpec(path=str(path), args=request.args, cwd=str(request.cwd)), path.stem


def _list_overrides(request: SubmitRequest) -> list[tuple[str, Any]]:
    return [
        *((path, parse_value(text, path)) for path, text in map(parse_assignment, request.assignments)),
        *request.sweep_values.items(),
    ]


def _build_values(document: Mapping[str, Any], source: str, cwd: Path) -> RecipeFile:
    document = adapter_checks.resolve_init(start_weights.apply_init(document, cwd), cwd)
    return build(presets.apply_preset(document), RecipeFile, source)

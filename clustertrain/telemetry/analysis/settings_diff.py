"""What was planned and set for a run, and where two runs differ in it."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain import schema
from clustertrain.config.unused_keys import in_use
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.run import json_files
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec


class Setting(msgspec.Struct, frozen=True):
    """Something that was set or planned otherwise, by its name in ``plan --json`` or in the recipe."""

    key: str
    a: Any
    b: Any


_RECIPE = "recipe."
_PLANNED = ("device", "precision", "nodes", "gpus_per_node", "world_size", "batch")
# What is set to choose a plan, not what came of it; where and how a run is kept and watched; and its name.
_LEFT_OUT = (
    "recipe.telemetry.",
    "recipe.tracking.",
    "recipe.rehearsal.",
    "recipe.parallel.",
    "job.",
    "script.cwd",
    "version",
    "env.",
    "secret_env",
)
_REPLACED = ("recipe.train.micro_batch", "recipe.train.global_batch", "recipe.train.precision")  # by the plan's
_OF_JOB = ("job.gpu_type", "job.cluster", "job.partition", "job.constraint", "job.cpus_per_gpu", "job.mem")


def settings_of(run: RunDir) -> dict[str, Any]:
    """What was planned and set and the run goes by, by dotted names; of environment variables the names alone, as they
    may be secrets.

    Raises:
        ConfigError: ``spec.toml`` or ``plan.json`` does not read.
    """
    plan, trouble = json_files.read(run.plan)
    if trouble is not None:
        raise ConfigError(trouble)
    found = _flat({name: plan[name] for name in _PLANNED if name in plan})
    layout = plan.get("layout")
    if layout and isinstance(layout, dict):
        found["layout"] = _words(layout)
        found.update({f"layout.{k}": v for k, v in layout.items() if k in _LAYOUT_KEYS})
    asked = load_spec(run)
    spec: dict[str, Any] = msgspec.to_builtins(asked)
    for name, value in _flat(spec).items():
        if name.startswith(_RECIPE) and not in_use(asked, name.removeprefix(_RECIPE)):
            continue
        replaced = name in _REPLACED and bool(plan)
        if name in _OF_JOB or not (name.startswith(_LEFT_OUT) or replaced):
            found[name] = value
    found["env"] = sorted({*asked.env, *asked.secret_env})
    return found


_LAYOUT_KEYS = ("activation_checkpointing", "reshard_after_forward", "offload", "virtual_stages")


def _words(layout: dict[str, Any]) -> Any:
    try:
        return schema.convert(layout, Layout).words()
    except msgspec.ValidationError:  # of another version
        return layout


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{above}{name}."))
        else:
            found[f"{above}{name}"] = value
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[Setting]:
    """What the two do not share; a setting that one of them does not have is None there."""
    names = list(dict.fromkeys([*a, *b]))
    return [Setting(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]

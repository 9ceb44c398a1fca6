"""Planned and configured settings of a run."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain import schema
from clustertrain.config.checks.unused_keys import is_key_used
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.run import json_files, rank_python
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec

_RECIPE = "recipe."
_PLAN_KEYS = ("device", "precision", "nodes", "gpus_per_node", "world_size", "batch")
# Inputs of the planner (its results are compared), storage, tracking and telemetry of a run, and its name.
_IGNORED_PREFIXES = (
    "recipe.telemetry.",
    "recipe.tracking.",
    "recipe.preemption_test.",
    "recipe.parallel.",
    "job.",
    "script.cwd",
    "version",
    "env.",
    "secret_env",
)
_SUPERSEDED_BY_PLAN = ("recipe.train.micro_batch", "recipe.train.global_batch", "recipe.train.precision")
PYTHON = "python"  # prefix of the settings that the ranks record
_PYTHON_KEYS = ("python", "container", "packages")
_JOB_KEYS = ("job.gpu_type", "job.cluster", "job.partition", "job.constraint", "job.cpus_per_gpu", "job.mem")


def load_settings(run: RunDir) -> dict[str, Any]:
    """Load the effective settings of a run by dotted key.

    Of environment variables, only the names are included, because values may be secrets.

    Raises:
        ConfigError: ``spec.toml`` or ``plan.json`` cannot be read.
    """
    plan, error = json_files.load_document(run.plan)
    if error is not None:
        raise ConfigError(error)
    settings = _flatten({name: plan[name] for name in _PLAN_KEYS if name in plan})
    layout = plan.get("layout")
    if layout and isinstance(layout, dict):
        settings["layout"] = _format_layout(layout)
        settings.update({f"layout.{k}": v for k, v in layout.items() if k in _LAYOUT_KEYS})
    requested = load_spec(run)
    spec: dict[str, Any] = msgspec.to_builtins(requested)
    for name, value in _flatten(spec).items():
        if name.startswith(_RECIPE) and not is_key_used(requested, name.removeprefix(_RECIPE)):
            continue
        replaced = name in _SUPERSEDED_BY_PLAN and bool(plan)
        if name in _JOB_KEYS or not (name.startswith(_IGNORED_PREFIXES) or replaced):
            settings[name] = value
    settings["env"] = sorted({*requested.env, *requested.secret_env})
    python = rank_python.load_newest(run)
    settings.update(_flatten({PYTHON: {name: python[name] for name in _PYTHON_KEYS if name in python}}))
    return settings


_LAYOUT_KEYS = ("activation_checkpointing", "reshard_after_forward", "offload", "virtual_stages")


def _format_layout(layout: dict[str, Any]) -> Any:
    try:
        return schema.convert(layout, Layout).describe()
    except msgspec.ValidationError:  # of another version
        return layout


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat

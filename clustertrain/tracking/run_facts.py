"""What goes along with the scalars: the settings, the contract, and what the attempt runs on. Never the environment,
nor the settings of telemetry, which may hold secrets."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from clustertrain import fsio
from clustertrain.config.checks.unused_keys import is_key_used
from clustertrain.config.tracking import TrackingSpec
from clustertrain.run import json_files
from clustertrain.run.recipe_hash import load_recipe_hash
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec

_EXCLUDED_TABLES = ("telemetry", "tracking", "rehearsal")


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """``config`` is what the run goes by of its recipe, flattened, and the job's size; ``tags`` are of the run,
    ``attempt_tags`` of this start. ``project`` is what the recipe names, "" for nothing."""

    run: str
    name: str
    project: str
    spec: TrackingSpec
    config: dict[str, Any]
    tags: dict[str, str]
    attempt_tags: dict[str, str]
    metric: str  # the deciding one
    higher_is_better: bool


def load_run_metadata(run: RunDir, attempt: int) -> RunMetadata:
    """``attempt_tags`` 0: of none, when a run is handed on by hand.

    Raises:
        ConfigError, PermissionDenied: the run's spec does not read.
    """
    spec = load_spec(run)
    record: Mapping[str, Any] = json_files.load_document(run.record).value
    recipe: dict[str, Any] = msgspec.to_builtins(spec.recipe)
    recipe_values = flatten({table: value for table, value in recipe.items() if table not in _EXCLUDED_TABLES})
    used = {key: value for key, value in recipe_values.items() if is_key_used(spec, key)}
    job = {"job": {"nodes": spec.job.nodes, "gpus": spec.job.gpus, "layout": spec.job.layout}}
    script = {"script": {"path": spec.script.path, "args": list(spec.script.args)}} if spec.script else {}
    tags = {
        "run": run.id,
        "recipe_hash": load_recipe_hash(run),
        "user": str(record.get("user") or ""),
        "commit": str((record.get("git") or {}).get("commit") or ""),
        "sweep": str((record.get("sweep") or {}).get("id") or ""),
        "task": spec.recipe.contract.task,
        "target": spec.recipe.contract.target,
    }
    return RunMetadata(
        run=run.id,
        name=spec.job.name or run.id,
        project=spec.recipe.tracking.project,
        spec=spec.recipe.tracking,
        config={**used, **flatten({**job, **script, "metric": spec.recipe.deciding_metric})},
        tags={key: value for key, value in tags.items() if value},
        attempt_tags=_build_attempt_tags(run, attempt),
        metric=spec.recipe.deciding_metric,
        higher_is_better=spec.recipe.higher_is_better,
    )


def _build_attempt_tags(run: RunDir, attempt: int) -> dict[str, str]:
    if not attempt:
        return {}
    record = fsio.poll_json(run.attempt(attempt).record) or {}
    tags = {"attempt": str(attempt), "job_id": str(record.get("job_id") or ""), "host": socket.gethostname()}
    return {key: value for key, value in tags.items() if value}


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted names; empty values left out, lists as text."""
    result: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            result.update(flatten(value, f"{prefix}{name}."))
        elif value not in ("", None) and value != []:
            result[f"{prefix}{name}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return result

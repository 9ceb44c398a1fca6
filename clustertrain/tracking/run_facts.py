"""Metadata for trackers: settings, contract, and where the attempt runs.

The environment and the telemetry settings are never included, because they may contain secrets.
"""

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

_EXCLUDED_TABLES = ("telemetry", "tracking", "preemption_test")


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a run and one attempt."""

    run: str
    """The run id."""
    name: str
    project: str
    """The recipe's project, or an empty string."""
    spec: TrackingSpec
    config: dict[str, Any]
    """The recipe values that the run uses and the size of the job, by dotted key."""
    tags: dict[str, str]
    attempt_tags: dict[str, str]
    metric: str
    """The deciding metric."""
    higher_is_better: bool


def load_run_metadata(run: RunDir, attempt: int) -> RunMetadata:
    """Load the metadata of a run; ``attempt`` 0 means no attempt, for a manual upload.

    Raises:
        ConfigError, PermissionDenied: the run's spec cannot be read.
    """
    spec = load_spec(run)
    record: Mapping[str, Any] = json_files.load_document(run.record).value
    recipe: dict[str, Any] = msgspec.to_builtins(spec.recipe)
    recipe_values = flatten({table: value for table, value in recipe.items() if table not in _EXCLUDED_TABLES})
    used = {key: value for key, value in recipe_values.items() if is_key_used(spec, key)}
    job = {"job": {"nodes": spec.job.nodes, "gpus": spec.job.gpus, "layout": spec.job.layout}}
    script: dict[str, Any] = {}
    if spec.script is not None:
        program = {"command": list(spec.script.command)} if spec.script.command else {"args": list(spec.script.args)}
        script = {"script": {"path": spec.script.path, **program}}
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
    """Return ``table`` as one level with dotted keys, without empty values and with lists as text."""
    result: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            result.update(flatten(value, f"{prefix}{name}."))
        elif value not in ("", None) and value != []:
            result[f"{prefix}{name}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return result

"""What goes along with the scalars: the settings, the contract, and what the attempt runs on. Never the environment,
nor the settings of telemetry, which may hold secrets."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from clustertrain import fsio
from clustertrain.config.tracking import TrackingSpec
from clustertrain.config.unused_keys import in_use
from clustertrain.run import json_files
from clustertrain.run.recipe_hash import recipe_hash
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec

_LEFT_OUT = ("telemetry", "tracking", "rehearsal")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """``config`` is what the run goes by of its recipe, flattened, and the job's size; ``tags`` are of the run,
    ``attempt`` of this start. ``project`` is what the recipe names, "" for nothing."""

    run: str
    name: str
    project: str
    spec: TrackingSpec
    config: dict[str, Any]
    tags: dict[str, str]
    attempt: dict[str, str]
    metric: str  # the deciding one
    higher_is_better: bool


def of_run(run: RunDir, attempt: int) -> Facts:
    """``attempt`` 0: of none, when a run is handed on by hand.

    Raises:
        ConfigError, NotReadable: the run's spec does not read.
    """
    spec = load_spec(run)
    record: Mapping[str, Any] = json_files.read(run.record).value
    recipe: dict[str, Any] = msgspec.to_builtins(spec.recipe)
    kept = flat({table: value for table, value in recipe.items() if table not in _LEFT_OUT})
    used = {key: value for key, value in kept.items() if in_use(spec, key)}
    job = {"job": {"nodes": spec.job.nodes, "gpus": spec.job.gpus, "layout": spec.job.layout}}
    script = {"script": {"path": spec.script.path, "args": list(spec.script.args)}} if spec.script else {}
    tags = {
        "run": run.id,
        "recipe_hash": recipe_hash(run),
        "user": str(record.get("user") or ""),
        "commit": str((record.get("git") or {}).get("commit") or ""),
        "sweep": str((record.get("sweep") or {}).get("id") or ""),
        "task": spec.recipe.contract.task,
        "target": spec.recipe.contract.target,
    }
    return Facts(
        run=run.id,
        name=spec.job.name or run.id,
        project=spec.recipe.tracking.project,
        spec=spec.recipe.tracking,
        config={**used, **flat({**job, **script, "metric": spec.recipe.deciding_metric})},
        tags={key: value for key, value in tags.items() if value},
        attempt=_of_attempt(run, attempt),
        metric=spec.recipe.deciding_metric,
        higher_is_better=spec.recipe.higher_is_better,
    )


def _of_attempt(run: RunDir, attempt: int) -> dict[str, str]:
    if not attempt:
        return {}
    held = fsio.peek_json(run.attempt(attempt).record) or {}
    found = {"attempt": str(attempt), "job_id": str(held.get("job_id") or ""), "host": socket.gethostname()}
    return {key: value for key, value in found.items() if value}


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """By dotted names; empty values left out, lists as text."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{above}{name}."))
        elif value not in ("", None) and value != []:
            found[f"{above}{name}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return found

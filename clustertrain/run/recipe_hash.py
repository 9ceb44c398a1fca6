"""The recipe hash, which identifies runs of the same recipe."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from clustertrain.config.job import RunSpec
from clustertrain.config.recipe import Recipe
from clustertrain.run import json_files
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec

HASH_DIGITS = 16
# Monitoring, tracking and preemption tests do not change what is trained.
_EXCLUDED_TABLES = ("telemetry", "tracking", "preemption_test")


def hash_run_spec(spec: RunSpec) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the recipe as canonical JSON, with the script and its arguments.

    Only values that differ from the defaults count, so a key that a later version adds changes no hash.
    """
    identity: dict[str, Any] = {
        "recipe": _extract_changed(msgspec.to_builtins(spec.recipe), msgspec.to_builtins(Recipe()))
    }
    for table in _EXCLUDED_TABLES:
        identity["recipe"].pop(table, None)
    if spec.script is not None:
        identity["script"] = {"path": spec.script.path, "args": list(spec.script.args)}
        if spec.script.command:
            identity["script"]["command"] = list(spec.script.command)
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def load_recipe_hash(run: RunDir) -> str:
    """Return the hash that submit recorded; for runs of older versions, that of their recipe.

    Raises:
        ConfigError, PermissionDenied: the run's spec cannot be read.
    """
    recorded = json_files.poll_document(run.record).get("recipe_hash")
    return recorded if isinstance(recorded, str) and recorded else hash_run_spec(load_spec(run))


def _extract_changed(value: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, inner in value.items():
        default_value = default.get(key)
        if isinstance(inner, dict) and isinstance(default_value, dict):
            if nested := _extract_changed(inner, default_value):
                changed[key] = nested
        elif key not in default or inner != default_value:
            changed[key] = inner
    return changed

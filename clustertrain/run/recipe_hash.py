"""What tells runs of the same recipe from others: a hash of what was asked to be trained."""

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

DIGITS = 16
# How a run is watched and where its scalars go does not change what is trained, nor does a stop on purpose.
_LEFT_OUT = ("telemetry", "tracking", "rehearsal")


def hash_of(spec: RunSpec) -> str:
    """16 hexadecimal digits of the SHA-256 of the recipe as canonical JSON; of a script also its name and arguments.

    Only values that differ from the defaults enter: a key that a later version adds changes no hash.
    """
    asked: dict[str, Any] = {"recipe": _changed(msgspec.to_builtins(spec.recipe), msgspec.to_builtins(Recipe()))}
    for table in _LEFT_OUT:
        asked["recipe"].pop(table, None)
    if spec.script is not None:
        asked["script"] = {"path": spec.script.path, "args": list(spec.script.args)}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def recipe_hash(run: RunDir) -> str:
    """As submit has written it; of runs that older versions submitted, from their recipe.

    Raises:
        ConfigError, NotReadable: the run's spec does not read.
    """
    found = json_files.peek(run.record).get("recipe_hash")
    return found if isinstance(found, str) and found else hash_of(load_spec(run))


def _changed(value: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        usual = default.get(key)
        if isinstance(inner, dict) and isinstance(usual, dict):
            if below := _changed(inner, usual):
                found[key] = below
        elif key not in default or inner != usual:
            found[key] = inner
    return found

"""Recipes, `--set` assignments and cluster profiles: schema keys with arbitrary values, and damaged TOML."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import tomli_w
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.parsing.documents import list_keys
from clustertrain.config.recipe import Recipe
from tests.harness.fuzz.inputs.damage import byte_changes, change
from tests.harness.fuzz.inputs.text import arguments, deep, numbers, values
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox

# Keys that only name a command of the user's, which the program is asked to run.
RECIPE_KEYS = tuple(list_keys(Recipe))
PROFILE_KEYS = tuple(list_keys(ClusterProfile))
SIZES = (
    (),
    ("--nodes", "2", "--gpus", "8", "--gpu-type", "h100"),
    ("--nodes", "1", "--gpus", "4", "--device", "cpu"),
)
RAW_TOML = (
    b"x = " + deep(3_000).encode(),
    b"[" + b"a." * 2_000 + b"b]\n",
    b"x = " + b"9" * 5_000,
    b"\xef\xbb\xbf[train]\nsteps = 3\n",
    b"[train]\nsteps = 1\nsteps = 2\n",
    b"train.steps = 1979-05-27T07:32:00Z\n",
    b"[train]\nsteps = 0x7fffffffffffffffffff\n",
    b'"" = 1\n',
    b"\0",
    b"[env]\nA = 1\n",
)


def toml_values() -> SearchStrategy[Any]:
    """Draw :func:`values` that TOML can represent."""
    date = st.just(datetime.date(1979, 5, 27))
    return st.one_of(numbers(), values().map(_without_none), date)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return "" if value is None else value


def document_text(assignment: Mapping[str, Any]) -> bytes:
    """Return a TOML document with these dotted keys; a table replaces a value of the same name."""
    document: dict[str, Any] = {}
    for key, value in assignment.items():
        *tables, last = key.split(".")
        table_at = document
        for table in tables:
            inner = table_at.get(table)
            table_at[table] = inner if isinstance(inner, dict) else {}
            table_at = table_at[table]
        table_at[last] = value
    return tomli_w.dumps(document).encode("utf-8", "surrogatepass")


def documents(keys: tuple[str, ...]) -> SearchStrategy[bytes]:
    assignment = st.dictionaries(st.sampled_from(keys), toml_values(), min_size=1, max_size=4)
    whole = assignment.map(document_text)
    damaged = st.builds(change, whole, byte_changes())
    return st.one_of(whole, whole, damaged, st.sampled_from(RAW_TOML))


def play_recipe(box: Sandbox, drawn: tuple[bytes, tuple[str, ...]]) -> None:
    text, sizes = drawn
    (box.site / "fuzzed.toml").write_bytes(box.arm_bytes(text))
    box.call(["plan", *sizes, "fuzzed.toml"])


def play_assignments(box: Sandbox, drawn: tuple[list[tuple[str, str]], tuple[str, ...]]) -> None:
    pairs, sizes = drawn
    options = [word for key, value in pairs for word in ("--set", f"{key}={value}")]
    box.call(["plan", *sizes, *options, "--json"])


def play_profile(box: Sandbox, text: bytes) -> None:
    (box.site / "profiles").mkdir(exist_ok=True)
    (box.site / "profiles" / "fuzzed.toml").write_bytes(box.arm_bytes(text))
    box.call(["cluster", "show", "fuzzed"])
    box.call(["cluster", "list", "--json"])
    box.call(["submit", "--dry-run", "--backend", "slurm", "--cluster", "fuzzed", "--nodes", "2", "--gpus", "4"])


def assignments() -> SearchStrategy[list[tuple[str, str]]]:
    key = st.sampled_from(RECIPE_KEYS) | arguments()
    value = arguments() | numbers().map(str) | st.sampled_from(("{}", "[]", "[{}]", deep(2_000), "inf", "true"))
    return st.lists(st.tuples(key, value.filter(lambda v: "\0" not in v)), min_size=1, max_size=3)


CLASSES = (
    InputClass("recipes", lambda: st.tuples(documents(RECIPE_KEYS), st.sampled_from(SIZES)), play_recipe, 25),
    InputClass("assignments", lambda: st.tuples(assignments(), st.sampled_from(SIZES)), play_assignments, 25),
    InputClass("profiles", lambda: documents(PROFILE_KEYS), play_profile, 60),
)

"""The keys of a recipe: explained, and as a JSON Schema."""

from __future__ import annotations

import json
import tomllib

import jsonschema
import pytest
from click.testing import CliRunner, Result

from clustertrain.cli.recipe import build_schema, recipe
from clustertrain.errors import NotFound
from tests.paths import ROOT

RECIPES = sorted((ROOT / "examples").rglob("*.toml"))


def call(*argv: str) -> Result:
    return CliRunner().invoke(recipe, argv, standalone_mode=False)


def test_key_is_explained() -> None:
    out = call("explain", "optim.lr").stdout
    assert out.splitlines()[0] == "optim.lr  number, > 0, ≤ 1000; default 0.0003" and "Peak learning rate" in out
    (row,) = json.loads(call("explain", "adapter.kind", "--json").stdout)["keys"]
    assert row["key"] == "adapter.kind" and row["allowed"] == '"none", "lora", "dora"' and "`" not in str(row)


def test_table_is_explained_key_by_key() -> None:
    out = call("explain", "job").stdout
    assert "job.nodes  integer" in out and "job.gpus  integer" in out


def test_unknown_key_is_refused_with_the_nearest() -> None:
    error = call("explain", "optm.lr").exception
    assert isinstance(error, NotFound) and error.fix is not None and "optim.lr" in error.fix


def test_unknown_key_with_nothing_near_lists_only_the_tables() -> None:
    error = call("explain", "zzzzzz").exception
    assert isinstance(error, NotFound) and error.fix is not None
    assert "optim" in error.fix and "optim.lr" not in error.fix


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_schema_accepts_the_examples(path: object) -> None:
    assert isinstance(path, type(ROOT))
    jsonschema.Draft202012Validator(build_schema()).validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    "document", [{"optim": {"lrr": 1.0}}, {"optimizer": {}}, {"job": {"nodes": "two"}}, {"adapter": {"kind": "ia3"}}]
)
def test_schema_refuses_what_submit_refuses(document: dict[str, object]) -> None:
    schema = build_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(document)


def test_every_key_in_the_schema_has_a_description() -> None:
    schema = build_schema()
    tables = {name: table.get("properties", {}) for name, table in {"": schema, **schema["$defs"]}.items()}
    missing = [
        f"{name}.{key}"
        for name, keys in tables.items()
        for key, value in keys.items()
        if "description" not in value and "$ref" not in str(value)
    ]
    assert missing == []

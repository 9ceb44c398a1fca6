"""The keys of a recipe: explained, and as a JSON Schema."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from clustertrain.cli.init import init
from clustertrain.cli.recipe import build_schema, format_schema, recipe
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, NotFound, UsageError
from tests.paths import ROOT

RECIPES = sorted((ROOT / "examples").rglob("*.toml"))


@functools.cache
def make_validator() -> Any:
    schema = build_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "did you mean optim.lr?"),
        ("learning_rate", "did you mean optim.lr?"),
        ("dim", "model.dim"),
        ("optim.lrr", "did you mean optim.lr?"),
        ("optim.steps", "train.steps"),
        ("optm", "did you mean optim?"),
        ("optm.lr", "did you mean optim.lr"),
        ("", "known: adapter"),
        (".", "known: adapter"),
    ],
)
def test_key_without_its_table_is_found(name: str, meant: str) -> None:
    error = call("explain", name).exception
    assert isinstance(error, NotFound) and meant in str(error.fix)


def test_unknown_key_with_nothing_near_lists_only_the_tables() -> None:
    error = call("explain", "zzzzzz").exception
    assert isinstance(error, NotFound) and error.fix is not None
    assert "optim" in error.fix and "optim.lr" not in error.fix


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_schema_accepts_the_examples(path: object) -> None:
    assert isinstance(path, type(ROOT))
    make_validator().validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    "document", [{"optim": {"lrr": 1.0}}, {"optimizer": {}}, {"job": {"nodes": "two"}}, {"adapter": {"kind": "ia3"}}]
)
def test_schema_refuses_what_submit_refuses(document: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        make_validator().validate(document)


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
    texts = json.dumps(schema)
    assert "``" not in texts and not re.search(r":[a-z]+:`", texts)  # editors show Markdown


def taplo(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Check TOML files as editors do that use taplo, such as VS Code with Even Better TOML."""
    command = [Path(sys.executable).with_name("taplo"), "lint", "--no-auto-config", *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_editors_accept_the_examples(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(format_schema())
    done = taplo("--schema", f"file://{tmp_path}/schema.json", *map(str, RECIPES), cwd=tmp_path)
    assert len(RECIPES) > 6 and done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[optim]\nlrr = 1.0", "'lrr' was unexpected"),
        ('[optim]\nlr = "high"', '"high" is not of type "number"'),
        ('[data]\nkind = "tokes"', '"tokes" is not'),
        ("[job]\nnodes = 1.5", "is not of type"),
    ],
)
def test_editors_mark_wrong_keys_and_values_of_a_new_recipe(tmp_path: Path, line: str, said: str) -> None:
    """``init recipe --schema`` names the schema in the first line; taplo reads it from there."""
    done = CliRunner().invoke(init, ["recipe", "--schema", "-o", str(tmp_path / "new.toml")], standalone_mode=False)
    assert "recipe.schema.json" in done.stdout
    assert taplo("new.toml", cwd=tmp_path).returncode == 0
    (tmp_path / "wrong.toml").write_text(f"#:schema ./recipe.schema.json\n{line}\n")
    wrong = taplo("wrong.toml", cwd=tmp_path)
    assert wrong.returncode == 1 and said in wrong.stderr, wrong.stderr


def test_shown_recipe_is_the_one_that_a_run_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a\nb.toml"
    Path(name).write_text('model.preset = "llama3.1-8b"\ndata.path = "x # \\n\\u007f"\noptim.lr = 2e-4\n')
    shown = call("show", name, "--set", "train.steps=7").stdout
    again = build(tomllib.loads(shown), Recipe, "again")
    assert (again.model.layers, again.data.seq_len, again.train.steps, again.optim.lr) == (32, 8192, 7, 2e-4)
    assert again.data.path == "x # \n\x7f"
    lines = shown.splitlines()
    assert "layers = 32 # model.preset" in lines and "steps = 7 # --set" in lines
    assert "lr = 0.0002 # a\\nb.toml" in lines
    assert "clip_norm = 1.0" in lines  # a default has no comment
    assert build(tomllib.loads(call("show").stdout), Recipe, "default") == Recipe()


@pytest.mark.parametrize("path", [p for p in RECIPES if "init" not in p.read_text()], ids=lambda path: path.name)
def test_examples_without_weights_can_be_shown(path: Path) -> None:
    done = call("show", str(path))
    assert done.exception is None
    build(tomllib.loads(done.stdout), Recipe, path.name)


def test_what_is_not_a_recipe_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(call("show", "train.py").exception, UsageError)
    assert isinstance(call("show", "missing.toml").exception, ConfigError)
    assert "optim.lr" in str(call("show", "--set", "optim.lrr=1").exception.fix)  # type: ignore[union-attr]

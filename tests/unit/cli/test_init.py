"""A first recipe and script: they are what submit takes."""

from __future__ import annotations

import ast
import os
import resource
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clustertrain.cli.init import init
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import apply_preset
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, UsageError
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*argv: str) -> Result:
    return CliRunner().invoke(init, argv, standalone_mode=False)


def read(name: str = "recipe.toml") -> Recipe:
    return build(apply_preset(tomllib.loads(Path(name).read_text())), Recipe, name)


def test_recipe_without_options_is_a_small_model_on_sample_text() -> None:
    assert "clustertrain plan recipe.toml" in call("recipe").stdout
    recipe = read()
    assert (recipe.model.preset, recipe.data.path, recipe.train.steps) == ("tiny", "stdlib", 1000)


def test_options_go_into_the_recipe(folder: Path) -> None:
    (folder / "shards").mkdir()
    (folder / "shards" / "a.bin").write_bytes(b"")
    options = ("--model", "llama3.1-8b", "--data", "shards", "--steps", "7", "--adapter", "-o", "b.toml")
    assert call("recipe", *options).exit_code == 0
    recipe = read("b.toml")
    assert (recipe.model.layers, recipe.data.kind, recipe.train.steps, recipe.adapter.kind) == (32, "tokens", 7, "lora")


def test_conversations_take_the_tokenizer_of_the_weights() -> None:
    hostile = 'a "b"\\c'
    assert call("recipe", "--model", f"/models/{hostile}", "--data", "x.jsonl").exit_code == 0
    document = tomllib.loads(Path("recipe.toml").read_text())
    assert document["model"]["init"] == document["data"]["tokenizer"] == f"/models/{hostile}"
    assert document["data"]["kind"] == "chat"


def test_recipe_that_submit_would_refuse_is_not_written() -> None:
    assert isinstance(call("recipe", "--data", "x.jsonl").exception, ConfigError)  # no tokenizer
    assert not Path("recipe.toml").exists()


def test_script_is_the_example_under_its_own_name() -> None:
    assert call("script", "-o", "mine.py").exit_code == 0
    text = Path("mine.py").read_text()
    ast.parse(text)
    assert "ct.session(" in text and "submit --gpus 2 mine.py" in text and "train_script" not in text
    assert text.replace("mine.py", "train_script.py") == (ROOT / "examples" / "train_script.py").read_text()


@pytest.mark.parametrize("kind", ["recipe", "script"])
def test_existing_file_is_replaced_only_with_force(kind: str) -> None:
    Path("x").write_text("mine")
    assert isinstance(call(kind, "-o", "x").exception, UsageError) and Path("x").read_text() == "mine"
    assert call(kind, "-o", "x", "--force").exit_code == 0 and Path("x").read_text() != "mine"
    assert isinstance(call(kind, "-o", "no/such/x").exception, UsageError)


@pytest.mark.parametrize("argv", [("recipe",), ("recipe", "--schema"), ("script",)], ids=" ".join)
def test_full_disk_is_reported_with_the_file_and_leaves_nothing(folder: Path, argv: tuple[str, ...]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # Python ignores SIGXFSZ, so that write(2) fails
    try:
        result = call(*argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    name = "train.py" if argv == ("script",) else "recipe.toml"
    assert isinstance(result.exception, ConfigError) and f"{folder / name} cannot be written" in str(result.exception)
    assert list(folder.iterdir()) == []


def test_link_stays_and_a_fifo_is_not_replaced(folder: Path) -> None:
    (folder / "recipe.toml").symlink_to("target.toml")
    (folder / "target.toml").touch(mode=0o640)
    assert call("recipe", "--force").exit_code == 0
    assert (folder / "recipe.toml").is_symlink() and read("target.toml").model.preset == "tiny"
    os.mkfifo("pipe")
    result = call("script", "-o", "pipe", "--force")
    assert isinstance(result.exception, UsageError) and "not a regular file" in str(result.exception)
    assert Path("pipe").is_fifo()


def test_path_that_is_not_utf_8_is_refused(folder: Path) -> None:
    result = call("recipe", "--model", os.fsdecode(b"/models/caf\xe9"))
    assert isinstance(result.exception, UsageError) and "UTF-8" in str(result.exception)
    assert list(folder.iterdir()) == []

"""A first recipe and script: they are what submit takes."""

from __future__ import annotations

import ast
import os
import resource
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import clustertrain.cli.init as init_command
from clustertrain.cli.init import init
from clustertrain.config.cluster import ClusterProfile, load_profile
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import apply_preset
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ClusterTrainError, ConfigError, UsageError
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


def test_conversations_take_the_tokenizer_of_the_weights(folder: Path) -> None:
    weights = folder / 'a "b"\\c'
    weights.mkdir()
    (folder / "x.jsonl").touch()
    assert call("recipe", "--model", str(weights), "--data", "x.jsonl").exit_code == 0
    document = tomllib.loads(Path("recipe.toml").read_text())
    assert document["model"]["init"] == document["data"]["tokenizer"] == str(weights)
    assert document["data"]["kind"] == "chat"


def test_recipe_that_submit_would_refuse_is_not_written() -> None:
    Path("x.jsonl").touch()
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
    weights = folder / os.fsdecode(b"caf\xe9")
    weights.mkdir()
    result = call("recipe", "--model", str(weights))
    assert isinstance(result.exception, UsageError) and "UTF-8" in str(result.exception)
    assert list(folder.iterdir()) == [weights]


def test_loop_of_links_and_long_name_are_reported_with_the_file_and_a_fix(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    for output in ("loop", "a" * 260):
        for force in ([], ["--force"]):
            error = call("recipe", "-o", output, *force).exception
            assert isinstance(error, ConfigError) and f"{output} cannot be written" in error.message and error.fix
    assert (folder / "loop").is_symlink()


def test_commands_to_copy_are_quoted() -> None:
    assert "clustertrain plan 'a b.toml'  " in call("recipe", "-o", "a b.toml").stdout
    assert "submit --gpus 2 'a b.py'  " in call("script", "-o", "a b.py").stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--model", "Tiny"), "did you mean tiny"),
        (("--model", "nonsense"), "known: "),
        (("--model", "no/such"), "check the path"),
        (("--data", "no-such.jsonl"), "check the path"),
        (("--data", "stdlb"), "did you mean stdlib"),
    ],
)
def test_option_that_names_nothing_is_refused(folder: Path, argv: tuple[str, ...], named: str) -> None:
    error = call("recipe", *argv).exception
    assert isinstance(error, UsageError) and argv[1] in error.message and named in str(error.fix)
    assert list(folder.iterdir()) == []


def test_unchecked_accepts_what_only_the_nodes_have() -> None:
    argv = ("recipe", "--model", "/nodes/weights", "--data", "/nodes/chat.jsonl")
    assert call(*argv).exit_code == 1
    error = call("recipe", "--data", "/nodes/x").exception
    assert isinstance(error, UsageError) and "--unchecked" in error.fix
    assert call(*argv, "--unchecked").exit_code == 0
    document = tomllib.loads(Path("recipe.toml").read_text())
    assert document["model"] == {"init": "/nodes/weights"}
    assert (document["data"]["kind"], document["data"]["path"]) == ("chat", "/nodes/chat.jsonl")


@pytest.mark.parametrize("option", ["--model", "--data"])
def test_option_with_a_name_that_is_too_long_is_refused(option: str) -> None:
    error = call("recipe", option, "a" * 300).exception
    assert isinstance(error, ConfigError) and error.fix == "shorten the name"


def test_steps_that_are_no_number_are_named_in_plain_words() -> None:
    assert "'abc' is not a whole number" in str(call("recipe", "--steps", "abc").exception)
    assert "x>=1" in str(call("recipe", "--steps", "0").exception)


def test_wrong_answers_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_command, "_is_terminal", lambda: True)
    answers = "nonsense\nTiny\n  125m \nno-such\n stdlib \nabc\n7\n"
    result = CliRunner().invoke(init, ["recipe"], input=answers, standalone_mode=False)
    assert result.exit_code == 0, result
    assert "no preset 'nonsense'" in result.output and "  fix: did you mean tiny? Otherwise check" in result.output
    assert "llama3.2-1b, tiny. Otherwise check" in result.output
    assert "no-such: no such file or folder" in result.output and "'abc' is not a whole number" in result.output
    recipe = read()
    assert (recipe.model.preset, recipe.data.path, recipe.train.steps) == ("125m", "stdlib", 7)


SITE = ("--partition", 'g"pu', "--account", "a", "--gpu-type", "h100", "--gpus-per-node", "8", "--time", "1-00:00:00")


def test_profile_is_one_that_submit_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    result = call("profile", "big", *SITE, "--setup", "module load cuda", "--setup", "echo 'a \x7f b' # no")
    assert result.exit_code == 0 and "clustertrain cluster detect big" in result.stdout
    profile = load_profile("big")
    assert (profile.partition, profile.account, profile.gpu_type, profile.gpus_per_node, profile.time) == (
        'g"pu', "a", "h100", 8, "1-00:00:00",
    )  # fmt: skip
    assert profile.setup == ("module load cuda", "echo 'a \x7f b' # no")
    assert "exists" in str(call("profile", "big").exception)
    assert call("profile", "big", "--force").exit_code == 0
    assert load_profile("big") == ClusterProfile()  # what is not known is a comment with an example
    assert '# account = "project-123"' in (folder / "clustertrain" / "clusters" / "big.toml").read_text()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), "NAME"),
        (("a/b",), "letters"),
        (("a", "--time", "soon"), "minutes"),
        (("a", "--partition", "\udcff"), "UTF-8"),
    ],
)
def test_profile_that_is_none_is_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], named: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    error = call("profile", *argv).exception
    assert isinstance(error, ClusterTrainError) and named in f"{error.message} {error.fix}"
    assert not (folder / "config").exists()


def test_profile_asks_for_what_no_option_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setattr(init_command, "_is_terminal", lambda: True)
    answers = "a/b\nbig\ngpu\n\nmany\n8\nsoon\n60\nmodule load cuda\n"
    result = CliRunner().invoke(init, ["profile", "--account", "a"], input=answers, standalone_mode=False)
    assert result.exit_code == 0, result.output
    assert "'many' is not a whole number" in result.output and "time limit 'soon'" in result.output
    profile = load_profile("big")
    assert (profile.partition, profile.account, profile.gpu_type, profile.gpus_per_node) == ("gpu", "a", "", 8)
    assert (profile.time, profile.setup) == ("60", ("module load cuda",))

"""A run's command, submitted again with other options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cli.main import main
from clustertrain.cli.rerun import insert_options
from clustertrain.run import lookup
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("fake_slurm")]
RunCli = Callable[..., tuple[int, RunDir]]


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run a command line in an empty folder. It returns the exit code and the newest run."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.toml").write_text("[optim]\nlr = 0.1\n")
    monkeypatch.chdir(folder)

    def call(*args: str) -> tuple[int, RunDir]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        return main(), lookup.list_runs()[0]

    return call


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--nodes", "2", "train.py", "--lr", "1"], ["--nodes", "2", "--nodes", "4", "train.py", "--lr", "1"]),
        (["--share", "--set=optim.lr=1", "a.toml"], ["--share", "--set=optim.lr=1", "a.toml", "--nodes", "4"]),
        (["a.toml", "--nodes", "2"], ["a.toml", "--nodes", "2", "--nodes", "4"]),
        (["--gpus", "2", "--", "cat", "-n"], ["--gpus", "2", "--nodes", "4", "--", "cat", "-n"]),
        (["-m", "trl.sft", "--x"], ["--nodes", "4", "-m", "trl.sft", "--x"]),
        ([], ["--nodes", "4"]),
    ],
)
def test_options_override_those_of_the_run(args: list[str], expected: list[str]) -> None:
    assert insert_options(args, ["--nodes", "4"]) == expected


def test_run_is_submitted_again_with_other_options(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, first = run_cli("submit", "--nodes", "2", "--set", "optim.lr=0.2", "a.toml")
    assert code == 0
    monkeypatch.chdir(tmp_path)
    code, second = run_cli("rerun", first.id, "--set", "optim.lr=0.3", "--nodes", "4")
    assert code == 0 and second.id != first.id
    spec = load_spec(second)
    assert (spec.job.nodes, spec.recipe.optim.lr) == (4, 0.3)
    # The run that was submitted again can be, too.
    assert json.loads(second.record.read_text())["argv"][1] == "submit"
    code, third = run_cli("rerun", second.id)
    assert code == 0 and load_spec(third) == spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("other.py",), "'other.py' is not an option of submit"),
        (("--", "echo", "hi"), "is not an option of submit"),
        (("--nodes", "2", "x.toml"), "'x.toml' is not an option of submit"),
        (("--name",), "requires an argument"),
        (("--nope",), "No such option"),
    ],
)
def test_only_complete_options_are_added(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    _, first = run_cli("submit", "a.toml")
    code, newest = run_cli("rerun", first.id, *options)
    assert code == 2 and newest == first and message in capsys.readouterr().err


def test_options_after_the_recipe_are_overridden(run_cli: RunCli) -> None:
    _, first = run_cli("submit", "a.toml", "--nodes", "2")
    code, second = run_cli("rerun", first.id, "--nodes", "4")
    assert code == 0 and load_spec(second).job.nodes == 4


def test_secret_of_the_command_has_to_be_given_again(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    _, first = run_cli("submit", "--env", "TOKEN=abc", "a.toml")
    code, newest = run_cli("rerun", first.id)
    err = capsys.readouterr().err
    assert code == 1 and newest == first and "the value of TOKEN is a secret" in err and "abc" not in err


def test_run_of_another_command_or_folder_is_refused(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    _, first = run_cli("submit", "a.toml")
    record = json.loads(first.record.read_text())
    for change, message in (
        ({"argv": ["clustertrain", "wrap", "--", "a"]}, "was created by `wrap`, not by `submit`"),
        ({"cwd": "/no/such/folder"}, "/no/such/folder, where it was submitted, no longer exists"),
        ({"argv": "submit"}, "its command is not recorded"),
        ({"argv": ["clustertrain", "submit", 2]}, "its command is not recorded"),
    ):
        first.record.write_text(json.dumps({**record, **change}))
        code, _ = run_cli("rerun", first.id)
        assert code == 1 and message in capsys.readouterr().err

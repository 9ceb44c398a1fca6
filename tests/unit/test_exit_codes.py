"""The exit codes and error messages of the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from clustertrain import errors
from clustertrain.cli import main as command_line
from clustertrain.errors import ClusterTrainError


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment without runs, Slurm and profiles."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    return {**clean, "CLUSTERTRAIN_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "no-programs")}


def _run(env: Mapping[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clustertrain", *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def _classes() -> dict[str, type[ClusterTrainError]]:
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    return {name: value for name, value in classes.items() if issubclass(value, ClusterTrainError)}


def test_docstring_shows_the_classes_and_their_codes() -> None:
    drawn = re.findall(r"^[│├└─ ]*(\w+) +(\d+) ", errors.__doc__ or "", flags=re.MULTILINE)
    assert {name: int(code) for name, code in drawn} == {n: c.exit_code for n, c in _classes().items()}


def test_exit_codes_have_their_documented_values() -> None:
    named = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert named == {
        "EXIT_SUCCESS": 0,
        "EXIT_FAILED": 1, "EXIT_USAGE": 2, "EXIT_STOPPED": 75, "EXIT_CONFIG": 78, "EXIT_NO_REQUEUE": 93
    }  # fmt: skip
    assert {c.exit_code for c in _classes().values()} <= set(named.values())


def test_message_of_an_error_ends_with_the_fix() -> None:
    assert str(ClusterTrainError("it broke", fix="repair it")) == "it broke\n  fix: repair it"
    assert str(ClusterTrainError("it broke")) == "it broke"


@pytest.mark.parametrize("error", list(_classes().values()), ids=lambda c: c.__name__)
def test_each_error_class_exits_with_its_code(
    error: type[ClusterTrainError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> int:
        raise error("the reason", fix="the fix")

    monkeypatch.setattr(command_line.cli, "main", fail)
    assert command_line.main() == error.exit_code
    output = capsys.readouterr()
    assert output.err == "clustertrain: the reason\n  fix: the fix\n"
    assert output.out == ""


@pytest.mark.parametrize(("typed", "meant"), [("statsu", "status"), ("sumbit", "submit"), ("log", "logs")])
def test_unknown_verb_suggests_a_similar_one(env: dict[str, str], typed: str, meant: str) -> None:
    done = _run(env, typed)
    assert done.returncode == 2
    assert f"{typed!r}: did you mean {meant}" in done.stderr


def test_unknown_verb_without_a_similar_one_lists_all(env: dict[str, str]) -> None:
    done = _run(env, "xyzzy")
    assert done.returncode == 2
    assert all(verb in done.stderr for verb in command_line.COMMANDS)


@pytest.mark.parametrize("argv", [["submit", "--nodes", "0"], ["submit", "--nodse", "2"], ["status", "a", "b"]])
def test_wrong_options_are_usage_errors(env: dict[str, str], argv: list[str]) -> None:
    done = _run(env, *argv)
    assert done.returncode == 2
    assert "Try 'clustertrain" in done.stderr


def _long(*cases: object) -> list[object]:
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize(
    "verb", ["status", *_long("wait", "cancel", "requeue", "logs", "telemetry", "checkpoint list")]
)
def test_unknown_run_exits_with_1(env: dict[str, str], verb: str) -> None:
    done = _run(env, *verb.split(), "no-such-run")
    assert done.returncode == 1
    assert "no-such-run" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_missing_target_is_a_usage_error(env: dict[str, str]) -> None:
    done = _run(env, "submit", "no-such-recipe.toml")
    assert done.returncode == 2
    assert "no-such-recipe.toml: no such file" in done.stderr


def test_unknown_recipe_key_suggests_a_similar_one(env: dict[str, str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[train]\nstpes = 4\n")
    done = _run(env, "plan", str(recipe))
    assert done.returncode == 78
    assert "train.stpes" in done.stderr
    assert "did you mean train.steps?" in done.stderr


def test_missing_slurm_exits_with_78(env: dict[str, str]) -> None:
    done = _run(env, "submit", "--backend", "slurm")
    assert done.returncode == 78
    assert "sbatch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [["list"], *_long(["--help"], ["plan"], ["plan", "--json"], ["submit", "--dry-run"])])
def test_reader_that_has_exited_causes_no_message(env: dict[str, str], argv: list[str]) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        command = [sys.executable, "-m", "clustertrain", *argv]
        done = subprocess.run(
            command, env=env, stdout=write_fd, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    finally:
        os.close(write_fd)
    assert done.returncode in (0, 1)
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr

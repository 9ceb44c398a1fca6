"""Completion in a real bash, fish and zsh, of commands and of values."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.run import run_dir
from tests.paths import ROOT

pytestmark = pytest.mark.long  # starts several processes for each word
SCRIPT = """
eval "$(clustertrain completion bash)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_clustertrain_completion clustertrain
printf '%s\\n' "${COMPREPLY[@]}"
"""
Complete = Callable[..., list[str]]


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Complete:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    program = tmp_path / "bin" / "clustertrain"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m clustertrain "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    def call(*words: str) -> list[str]:
        result = subprocess.run(
            ["bash", "-c", SCRIPT, "bash", "clustertrain", *words], capture_output=True, text=True, check=True
        )
        assert result.stderr == ""
        return result.stdout.split()

    return call


def test_commands_and_options(complete: Complete) -> None:
    assert complete("sta") == ["status"]
    assert complete("plan", "--lay") == ["--layout"]
    assert "fsdp" in complete("submit", "--layout", "")


def test_values(complete: Complete) -> None:
    run = run_dir.create_run("net")
    run.spec.write_text("version = 1\n")
    assert complete("status", "n") == [run.id] and complete("logs", "la") == ["latest"]
    assert complete("submit", "--gpu-type", "h200") == ["h200"]
    assert complete("submit", "--set", "optim.lr") == ["optim.lr=", "optim.lr_reference_batch=", "optim.lr_scale="]
    assert complete("diagnose", "init") == ["init-loss"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("submit", "rec"), "file"),
        (("submit", "train.py", "da"), "file"),
        (("plan", "rec"), "file"),
        (("diagnose", "rec"), "file"),
        (("diagnose", "overfit", "rec"), "file"),
        (("adopt", "job"), "file"),
        (("telemetry", "--html", "x"), "file"),
        (("submit", "--checkpoint-dir", "x"), "dir"),
        (("init", "recipe", "--data", "x"), "file"),
        (("exec", "latest", "--", "nvidia"), "file"),
    ],
)
def test_files_and_folders_are_left_to_the_shell(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kind: str
) -> None:
    monkeypatch.setenv("_CLUSTERTRAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "\n".join(("clustertrain", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    command = [sys.executable, "-m", "clustertrain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.startswith(f"{kind},"), done


def test_sweeps(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "home" / "sweeps" / "net-abc234").mkdir(parents=True)
    assert complete("sweep", "show", "net") == ["net-abc234"]


def test_unreadable_home_completes_nothing(complete: Complete, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "file" / "home"))
    assert complete("status", "n") == []


# The script of each shell, run as a user's: fish has a command for it, and zsh types into a terminal of its own.
FISH = "clustertrain completion fish | source; complete -C $argv[1]"
ZSH = r"""
zmodload zsh/zpty zsh/datetime
zpty terminal zsh -f -i
zpty -w terminal 'autoload -Uz compinit; compinit -D; stty cols 300; LISTMAX=1000; PROMPT="READY> "'
zpty -w terminal 'eval "$(clustertrain completion zsh)"; bindkey "^T" complete-word; setopt noautomenu; print LOADED'
zpty -r -m terminal ignored $'*\nLOADED*READY> *'
zpty -n -w terminal "$1"$'\t'
output=''
# What it types is followed by nothing else, so it is complete when no more comes.
deadline=$((EPOCHREALTIME + 20))
until [[ $output == *${~2}* ]] || (( EPOCHREALTIME > deadline )); do
  zpty -r -t terminal more && output+=$more || sleep 0.05
done
print -r -- "$output"
zpty -d terminal
"""


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("clustertrain sta", ["status\tShow a run's progress, loss and attempts, and why it failed."]),
        ("clustertrain submit --layout zer", ["zero1"]),
        ("clustertrain submit --set optim.lr_s", ["optim.lr_scale="]),
        ("clustertrain submit --gpu-type h200", ["h200\t139.8 GiB"]),
        ("clustertrain diagnose init", ["init-loss"]),
        ("clustertrain status n", ["net"]),
        ("clustertrain submit pyproject.to", ["pyproject.toml"]),
    ],
)
def test_fish(complete: Complete, line: str, expected: list[str]) -> None:
    run = run_dir.create_run("net")
    run.spec.write_text("version = 1\n")
    done = subprocess.run(["fish", "-c", FISH, line], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ([run.id] if expected == ["net"] else expected)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("clustertrain sta", "clustertrain status"),
        ("clustertrain submit --set optim.lr_s", "clustertrain submit --set optim.lr_scale="),
        ("clustertrain status n", "clustertrain status net-"),
    ],
)
def test_zsh(complete: Complete, line: str, expected: str) -> None:
    run = run_dir.create_run("net")
    run.spec.write_text("version = 1\n")
    done = subprocess.run(["zsh", "-f", "-c", ZSH, "zsh", line, expected], capture_output=True, text=True, check=True)
    assert expected in done.stdout, done


def test_value_follows_a_key_without_a_blank(complete: Complete) -> None:
    script = subprocess.run(["clustertrain", "completion", "bash"], capture_output=True, text=True, check=True).stdout
    assert "compopt -o nospace" in script
    assert complete("submit", "--set", "optim.lr_s") == ["optim.lr_scale="]

"""Completion in a real bash, of commands and of values."""

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


def test_unreadable_home_completes_nothing(complete: Complete, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "file" / "home"))
    assert complete("status", "n") == []


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_other_shells_parse_their_completion(complete: Complete, shell: str, check: list[str], tmp_path: Path) -> None:
    script = subprocess.run(["clustertrain", "completion", shell], capture_output=True, text=True, check=True).stdout
    assert "_CLUSTERTRAIN_COMPLETE" in script
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, *check, tmp_path / "script"], check=True)

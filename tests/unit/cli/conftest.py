"""The command line as a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cli.main import main
from tests.fakes.slurm.fixture import FakeSlurm

RunCli = Callable[..., int]
THREE_D = ["--nodes", "4", "--gpus", "2", "--layout", "fsdp", "--tp", "2", "--pp", "2", "--device", "cpu"]


@pytest.fixture
def run_cli(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunCli:
    """Run a command line in an empty folder. It returns the exit code."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run_cli(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        return main()

    return run_cli

"""Commands can count a custom model before the job waits in the queue."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cli.main import main
from tests.fakes.slurm.fixture import FakeSlurm, fake_slurm

__all__ = ["fake_slurm"]
pytestmark = pytest.mark.ranks
RunCli = Callable[..., int]
NETS = """
import os
from torch import nn
print("printed while it is imported", os.getcwd())

class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        if width < 1:
            raise ValueError(f"a width of {width}")
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)
"""
PARAMETERS = 256 * 64 + 2 * 65 * 64 + 65 * 256


@pytest.fixture
def run_cli(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunCli:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "nets.py").write_text(NETS)
    (folder / "own.toml").write_text('[model]\nentry = "nets:Net"\n[data]\nseq_len = 32\n[train]\nglobal_batch = 32\n')
    monkeypatch.chdir(folder)

    def run_cli(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        return main()

    return run_cli


def test_plan_counts_and_traces_custom_model(run_cli: RunCli, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "own.toml", "--json", "--gpus", "2", "--layout", "zero1", "--trace-memory") == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["model_stats"]["parameters"] == PARAMETERS
    memory, gib = plan["memory"], 1024**3
    assert memory["params_gib"] * gib == pytest.approx(4 * PARAMETERS, rel=1e-6)
    assert memory["grads_gib"] == memory["params_gib"]
    assert memory["optimizer_gib"] * gib == pytest.approx(8 * PARAMETERS / 2, rel=1e-6)
    assert memory["activations_gib"] > 0 and memory["peak_gib"] > memory["overhead_gib"]
    assert 2.0 < memory["overhead_gib"] < 2.01  # CUDA context, NCCL, and 5% of the tensors' memory
    assert any(reason.startswith("counted: nets:Net has") for reason in plan["reasons"])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.args.width=0", "model.entry = 'nets:Net': ValueError: a width of 0"),
        ("model.args.wdith=8", "model.args = { wdith = 8 }: nets:Net: got an unexpected keyword argument"),
        ("model.entry=nets:Nte", "model.entry = 'nets:Nte': module 'nets' has no attribute"),
    ],
)
def test_error_of_custom_model_is_reported_before_submission(
    assignment: str,
    message: str,
    run_cli: RunCli,
    fake_slurm: FakeSlurm,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_cli("submit", "own.toml", "--count-model", "--set", assignment) == 78
    assert message in capfd.readouterr().err
    assert fake_slurm.calls("sbatch") == [] and not (tmp_path / "home").exists()


def test_submit_counts_only_on_request(run_cli: RunCli, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_cli("submit", "own.toml", "--dry-run", "--json", "--set", "model.args.width=0") == 0
    assert json.loads(capfd.readouterr().out)["plan"]["model_stats"] is None
    assert run_cli("submit", "own.toml", "--dry-run", "--json", "--count-model") == 0
    assert json.loads(capfd.readouterr().out)["plan"]["model_stats"]["parameters"] == PARAMETERS

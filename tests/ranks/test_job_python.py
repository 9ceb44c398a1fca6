"""A base install that submits, and ranks with another Python that has torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.base_environment import BaseInstall, build_base_environment
from tests.paths import ROOT
from tests.runs import DEVICE

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(DEVICE != "cpu", reason="the base install has no emulated device")]
RECIPE = """
[model]
dim = 32
layers = 2
heads = 2
kv_heads = 1
[data]
seq_len = 32
[train]
steps = 3
global_batch = 4
"""
SCRIPT = """
import clustertrain as ct

with ct.session() as session:
    print("rank", session.rank)
"""


@pytest.mark.parametrize("target", ["gpt.toml", "train.py"])
def test_base_install_submits_ranks_with_torch(target: str, tmp_path: Path) -> None:
    (tmp_path / "gpt.toml").write_text(RECIPE)
    (tmp_path / "train.py").write_text(SCRIPT)
    base = BaseInstall(build_base_environment(tmp_path / "base"), tmp_path)
    base.environ["PYTHONPATH"] = str(ROOT)  # the ranks' clustertrain is that of these tests
    options = ("--backend", "local", "--device", "cpu", "--gpus", "2", "--wait")
    output = base("submit", *options, "--python", sys.executable, target)
    assert "completed" in output
    if target == "gpt.toml":
        assert "3/3" in base("status")
        assert "3 steps" in base("telemetry")
    else:
        assert "rank 0" in base("logs")

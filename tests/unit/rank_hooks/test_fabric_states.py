"""Checkpoints of Lightning's Fabric: those from which a training can continue are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.rank_hooks.clustertrain_hooks import calls, fabric_states
from clustertrain.rank_hooks.clustertrain_hooks.checkpoints import find_problem, list_saved
from clustertrain.rank_hooks.clustertrain_hooks.progress import Progress
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The `srun` command")
def test_saves_with_an_optimizer_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric import Fabric  # takes two seconds, in each process that collects the tests

    for name in ("save", "load"):
        monkeypatch.setattr(Fabric, name, getattr(Fabric, name))  # restores it after the test
    fabric_states.install(__import__("lightning.fabric.fabric", fromlist=["Fabric"]))
    first, second = (
        Progress(Rank(rank=0, world_size=1, attempt=n, run_dir=str(tmp_path / "run"), rank_dir=str(tmp_path)))
        for n in (1, 2)
    )
    monkeypatch.setattr(calls, "get_progress", lambda: first)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(2, 1)
    prepared: Any = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = prepared
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save(tmp_path / "early.ckpt", state)  # before the first step
    first.end_step(3)
    fabric.save(tmp_path / "a.ckpt", state)
    fabric.save(path=tmp_path / "b.ckpt", state={"model": model, "optimizer": optimizer.state_dict()})
    fabric.save(tmp_path / "export.ckpt", {"model": model})
    saved = list_saved(second.rank)
    assert saved == [str(tmp_path / "b.ckpt"), str(tmp_path / "a.ckpt")]
    assert [find_problem(path) for path in saved] == ["", ""]
    monkeypatch.setattr(calls, "get_progress", lambda: second)
    fabric.load(tmp_path / "a.ckpt", state)
    second.begin_at(0)  # SGD counts no steps
    assert second.step == 3

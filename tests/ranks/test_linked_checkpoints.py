"""An adapter over a frozen model on several ranks: later saves write the adapter only, under any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.rank_team import Team, run_team
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format.manifest import read_manifest, step_folder
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from tests.ranks.rank_pool import DEVICE

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(DEVICE != "cpu", reason="the mesh is on the CPU")]
WIDTH = 1500  # 8.6 MiB, of which no number of ranks has a multiple of a block


def train_and_save(team: Team, root: Path, strategy: str, steps: tuple[int, ...]) -> list[float]:
    """Job of a team: resume, and save after each step; return the fraction that each save wrote."""
    torch.manual_seed(7)
    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(WIDTH, 2))
    if strategy == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=team.new_group())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    state = {"model": model, "optimizer": optimizer}
    config = CheckpointConfig(attempt="1", layout={}, async_save=False)
    manager = CheckpointManager(root, Ranks(team.new_control_group()), config)
    manager.restore(state)
    written = []
    for step in steps:
        model(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = manager.save(step, state)
        assert saved is not None
        written.append(saved.written / saved.bytes)
    return written


@pytest.mark.parametrize(("strategy", "other"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_later_saves_write_the_adapter(tmp_path: Path, strategy: str, other: str) -> None:
    first, second, third = run_team(2, 1, train_and_save, tmp_path, strategy, (1, 2, 3))
    assert first == 1.0 and max(second, third) < 0.01
    resumed = run_team(2, 1, train_and_save, tmp_path, strategy, (4,))
    assert resumed[0] < 0.01
    reshaped = run_team(3, 1, train_and_save, tmp_path, other, (5, 6))
    assert reshaped[0] == 1.0 and reshaped[1] < 0.01
    assert [r["verified"] for r in inspect.list_checkpoints(tmp_path, verify=True)] == [True] * 3
    bases = [
        inspect.assemble_tensor(folder, next(t for t in read_manifest(folder).tensors if t.name == "model/0.weight"))
        for folder in (step_folder(tmp_path, 4), step_folder(tmp_path, 6))
    ]
    assert (bases[0] == bases[1]).all() and bases[0].any()

"""Checkpoints of state on a GPU: the copy overlaps training and contains the values at the time of the call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager, SaveResult
from clustertrain.checkpoint.offline import inspect

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WIDTH = 2048  # 48 MiB with Adam's moments
ABOUT_1_S = 2_000_000_000  # cycles of a GPU's clock


@pytest.fixture
def committed() -> list[SaveResult]:
    return []


@pytest.fixture
def manager(tmp_path: Path, committed: list[SaveResult]) -> Iterator[CheckpointManager]:
    checkpoint_manager = CheckpointManager(
        tmp_path / "c",
        Ranks(),
        CheckpointConfig(attempt="1", layout={}, device=torch.device("cuda", 0)),
        on_commit=committed.append,
    )
    checkpoint_manager.start()
    yield checkpoint_manager
    checkpoint_manager.close(60.0)


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, WIDTH, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def values(state: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    return [t.detach().cpu().clone() for p in model.parameters() for t in (p, *optimizer.state[p].values())]


def restored(root: Path, step: int) -> list[torch.Tensor]:
    state = state_of(99)
    reader = CheckpointManager(
        root, Ranks(), CheckpointConfig(attempt="9", layout={}, async_save=False, device=torch.device("cuda", 0))
    )
    checkpoint = reader.restore(state)
    assert checkpoint is not None and checkpoint.step == step
    return values(state)


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_changes_after_save_do_not_reach_it(manager: CheckpointManager, tmp_path: Path) -> None:
    state = state_of(1)
    before = values(state)
    manager.reserve(state)
    torch.cuda.synchronize()
    torch.cuda._sleep(ABOUT_1_S)  # the copy runs after it, and the changes below after the copy
    manager.save(3, state)
    with torch.no_grad():
        for p in state["model"].parameters():
            p.fill_(0.0)
            for t in state["optimizer"].state[p].values():
                t.zero_()
    manager.wait_for_saves()
    assert all_equal(restored(tmp_path / "c", 3), before)


def test_host_does_not_wait_for_copy(manager: CheckpointManager) -> None:
    state = state_of(1)
    manager.reserve(state)
    manager.save(1, state, wait=True)
    assert all(s._pinned for s in manager._staging_buffers[:1])
    torch.cuda.synchronize()
    torch.cuda._sleep(ABOUT_1_S)
    manager.save(2, state)
    assert not torch.cuda.current_stream().query()  # the GPU is still busy with the work before the copy
    manager.wait_for_saves()


def test_one_copy_is_staged_while_another_is_written(
    manager: CheckpointManager, committed: list[SaveResult], tmp_path: Path
) -> None:
    contents = {}
    for step in (1, 2, 3, 4):
        state = state_of(step)
        contents[step] = values(state)
        manager.save(step, state)
    manager.wait_for_saves()
    assert [s.step for s in committed] == [1, 2, 3, 4]
    for step in (2, 3, 4):  # three are kept
        inspect.verify(index.step_folder(tmp_path / "c", step))
    assert all_equal(restored(tmp_path / "c", 4), contents[4])


def test_gpu_checkpoint_loads_on_cpu(manager: CheckpointManager, tmp_path: Path) -> None:
    state = state_of(1)
    manager.save(1, state, wait=True)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reader = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="9", layout={}, async_save=False))
    assert reader.restore({"model": model, "optimizer": optimizer}) is not None
    assert torch.equal(model.weight, state["model"].weight.cpu())

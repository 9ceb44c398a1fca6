"""Every optimizer saves and restores its state through every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import inner_optimizers
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.save.engines import ENGINES
from clustertrain.config.optim import OptimSpec
from clustertrain.errors import CheckpointError
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.optim import build, registry
from clustertrain.train.optim.param_info import build_param_table
from tests.unit.train.single_process import ALONE, single_process_group

pytestmark = pytest.mark.long

NESTED = ("muon", "soap", "adamw8bit")  # a pair of optimizers, lists of matrices, codes with their scales
CASES = [(n, "raw") for n in registry.OPTIMIZERS] + [(n, e) for n in NESTED for e in ENGINES if e != "raw"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.gain


@pytest.fixture
def one_rank() -> Iterator[None]:
    with single_process_group():
        yield


def make_state(name: str, *, zero1: bool = False) -> dict[str, Any]:
    torch.manual_seed(3)
    model, spec = Net(), OptimSpec(name=name, lr=0.01)  # type: ignore[arg-type]
    options = registry.build_options(spec, is_text=True, device=torch.device("cpu"))
    groups = ProcessGroups(init_device_mesh("cpu", (1,)) if zero1 else None, None, None, None)
    context = dataclasses.replace(ALONE, layout=Layout(strategy="zero1")) if zero1 else ALONE
    param_table = build_param_table(model)
    optimizer = build.build_optimizer(
        name, None, options, model=model, param_table=param_table, context=context, groups=groups
    )
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any], first: int, last: int, unfreeze_step: int = 0) -> None:
    """Train steps ``first`` to ``last - 1``, with the first layer frozen until ``unfreeze_step``."""
    for step in range(first, last):
        torch.manual_seed(100 + step)
        state["model"](torch.randn(4, 8)).square().mean().backward()
        if step < unfreeze_step:
            state["model"].layers[0].zero_grad()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def manager(root: Path, engine: str) -> CheckpointManager:
    return CheckpointManager(
        root, Ranks(), CheckpointConfig(attempt="1", layout={"strategy": "single"}, engine=engine, async_save=False)
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by torchsnapshot's imports
@pytest.mark.parametrize(("name", "engine"), CASES)
def test_training_resumes_bit_by_bit(name: str, engine: str, tmp_path: Path) -> None:
    saved = make_state(name)
    train(saved, 0, 3)
    assert manager(tmp_path, engine).save(3, saved, {}) is not None
    train(saved, 3, 5)
    resumed = make_state(name)
    restored = manager(tmp_path, engine).restore(resumed)
    assert restored is not None and restored.step == 3
    train(resumed, 3, 5)
    for (n, a), b in zip(saved["model"].named_parameters(), resumed["model"].parameters(), strict=True):
        assert torch.equal(a, b), n


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch's import
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_frozen_layer_without_state_resumes(name: str, zero1: bool, tmp_path: Path) -> None:
    uninterrupted, saved, resumed = (make_state(name, zero1=zero1) for _ in range(3))
    train(uninterrupted, 0, 5, unfreeze_step=3)
    train(saved, 0, 2, unfreeze_step=3)
    assert manager(tmp_path, "raw").save(2, saved, {}) is not None
    assert manager(tmp_path, "raw").restore(resumed) is not None
    frozen = {id(p) for p in resumed["model"].layers[0].parameters()}
    optimizers = inner_optimizers(resumed["optimizer"])
    with_state = {id(one.model_param(p)) for one in optimizers for p in one.params if p in one.optimizer.state}
    assert with_state and not with_state & frozen
    train(resumed, 2, 5, unfreeze_step=3)
    for (n, a), b in zip(uninterrupted["model"].named_parameters(), resumed["model"].parameters(), strict=True):
        assert torch.equal(a, b), n
    fresh = make_state(name, zero1=zero1)["model"].layers[0].weight
    assert not torch.equal(resumed["model"].layers[0].weight, fresh)


@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_restore_before_first_step(name: str, tmp_path: Path) -> None:
    saved, restored = make_state(name), make_state(name)
    assert manager(tmp_path, "raw").save(0, saved, {}) is not None
    assert manager(tmp_path, "raw").restore(restored) is not None
    for state in (saved, restored):
        train(state, 0, 2)
    for a, b in zip(saved["model"].parameters(), restored["model"].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("saved_fused", "own_fused"), [(False, True), (True, False)])
def test_kernels_are_the_resumed_run_s(saved_fused: bool, own_fused: bool, tmp_path: Path) -> None:
    """A checkpoint from another device or layout has other values of fused and foreach."""
    states: list[dict[str, Any]] = []
    for fused in (saved_fused, own_fused):
        model = Net()
        states.append({"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01, fused=fused)})
    train(states[0], 0, 2)
    assert manager(tmp_path, "raw").save(2, states[0], {}) is not None
    assert manager(tmp_path, "raw").restore(states[1]) is not None
    (group,) = states[1]["optimizer"].param_groups
    assert group["fused"] is own_fused and group["lr"] == 0.01
    train(states[1], 2, 3)


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    saved = make_state("adamw")
    train(saved, 0, 1)
    assert manager(tmp_path, "raw").save(1, saved, {}) is not None
    with pytest.raises(CheckpointError, match="is lamb, but the state of adamw was saved") as error:
        manager(tmp_path, "raw").restore(make_state("lamb"))
    assert "optim.name" in error.value.fix

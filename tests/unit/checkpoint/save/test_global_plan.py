"""The merged state of ranks that hold different parts: values, parameter groups, and the writer of each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.save import global_plan
from clustertrain.errors import CheckpointError


def tree_of(stage: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": {f"{stage}.weight": {"__tensor__": f"model/{stage}.weight"}, "tied": {"__tensor__": "model/tied"}},
        "optimizer": {"groups": groups, "state": {f"{stage}.weight": {"step": {"__tensor__": f"o/{stage}/step"}}}},
        "note": {"by": stage, "list": [stage]},
    }


def test_values_of_ranks_merge_and_lowest_rank_wins() -> None:
    first = tree_of("a", [{"lr": 0.1, "params": ["tied", "a.weight"]}])
    last = tree_of("b", [{"lr": 0.5, "params": ["b.bias"]}, {"lr": 0.1, "params": ["b.weight", "tied"]}])
    merged = global_plan.merge_values([first, last], ["optimizer"])
    assert merged["model"] == {**first["model"], **last["model"]}
    assert merged["optimizer"]["state"] == {**first["optimizer"]["state"], **last["optimizer"]["state"]}
    assert merged["note"] == {"by": "a", "list": ["a"]}
    assert merged["optimizer"]["groups"] == [
        {"lr": 0.1, "params": ["a.weight", "b.weight", "tied"]},
        {"lr": 0.5, "params": ["b.bias"]},
    ]


def test_merged_groups_are_independent_of_layout() -> None:
    whole = [{"lr": 1, "params": ["z", "b", "a"]}, {"lr": 2, "params": ["c"]}]
    stages = [{"lr": 2, "params": ["c"]}, {"lr": 1, "params": ["b"]}, {"lr": 1, "params": ["a", "z"]}]
    assert global_plan.merge_groups(whole) == global_plan.merge_groups(stages)


def test_each_tensor_is_written_once_by_a_rank_that_holds_it() -> None:
    stage_0 = {"tied": ["shard", 0], "a": ["shard", 0], "step a": ["equal", 4], "step tied": ["equal", 4]}
    stage_1 = {"tied": ["shard", 2], "b": ["shard", 2], "step b": ["equal", 4], "buffer": ["first", 8]}
    chosen = global_plan.assign_writers([stage_0, {**stage_1, "step tied": ["equal", 4]}], [[0, 1], [2, 3]])
    assert (chosen["tied"], chosen["a"], chosen["b"], chosen["buffer"]) == (0, 0, 2, 2)
    assert chosen["step a"] in (0, 1)
    assert chosen["step b"] in (2, 3)
    # Balanced by size over all ranks that hold them.
    equal = {name: ["equal", size] for name, size in (("x", 100), ("y", 60), ("z", 50))}
    assert global_plan.assign_writers([equal], [[0, 1]]) == {"x": 0, "y": 1, "z": 1}


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))


def state_of(*groups: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    named = dict(model.named_parameters())
    return {
        "model": model,
        "optimizer": torch.optim.AdamW([{**g, "params": [named[n] for n in g["params"]]} for g in groups]),
    }


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()


def test_group_takes_options_of_its_members(manager: CheckpointManager) -> None:
    saved = state_of({"params": ["0.weight", "1.weight"], "lr": 0.5}, {"params": ["0.bias", "1.bias"], "lr": 0.25})
    train(saved)
    manager.save(1, saved)
    other = state_of({"params": ["1.bias"]}, {"params": ["0.bias"]}, {"params": ["1.weight", "0.weight"]})
    other["optimizer"].param_groups[2]["lr"] = torch.tensor(1.0)
    manager.restore(other)
    assert [float(g["lr"]) for g in other["optimizer"].param_groups] == [0.25, 0.25, 0.5]
    assert isinstance(other["optimizer"].param_groups[2]["lr"], torch.Tensor)
    for old, new in zip(saved["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(saved["optimizer"].state[old]["exp_avg"], other["optimizer"].state[new]["exp_avg"])


@pytest.mark.parametrize(
    "groups",
    [
        [{"params": ["0.weight", "1.weight", "0.bias", "1.bias"]}],
        [{"params": ["0.weight", "1.weight"]}, {"params": ["0.bias"]}],
    ],
    ids=["members of two groups with different options", "missing parameter"],
)
def test_unmatched_groups_are_an_error(manager: CheckpointManager, groups: list[dict[str, Any]]) -> None:
    saved = state_of({"params": ["0.weight", "1.weight"]}, {"params": ["0.bias", "1.bias"], "weight_decay": 0.0})
    manager.save(1, saved)
    with pytest.raises(CheckpointError, match="different parameters or groups than the saved one"):
        manager.restore(state_of(*groups))
    fewer = state_of({"params": ["0.weight"]}, {"params": ["0.bias"], "weight_decay": 0.0})
    manager.save(2, fewer)
    with pytest.raises(CheckpointError, match="different parameters or groups than the saved one"):
        manager.restore(saved)

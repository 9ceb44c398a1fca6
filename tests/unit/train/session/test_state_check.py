"""The warning about a learning-rate scheduler that checkpoints do not hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from clustertrain.train.session.state_check import find_missing_scheduler


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


def test_scheduler_outside_the_state_is_named_with_its_optimizer() -> None:
    optimizer = make_optimizer()
    CosineAnnealingLR(optimizer, 10)
    warning = find_missing_scheduler({"model": nn.Linear(2, 1), "opt": optimizer, "epoch": 3})
    assert warning is not None and warning.code == "scheduler_not_saved"
    assert "'opt'" in warning.text and 'state["scheduler"]' in warning.fix


def test_optimizer_without_scheduler_is_complete() -> None:
    assert find_missing_scheduler({"optimizer": make_optimizer(), "note": "text", "list": [1, 2]}) is None


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: [s], lambda s: SimpleNamespace(scheduler=s)])
def test_scheduler_in_the_state_is_found_also_in_a_wrapper(wrap: Any) -> None:
    optimizer = make_optimizer()
    parts = [LinearLR(optimizer, 0.1), CosineAnnealingLR(optimizer, 10)]
    scheduler = SequentialLR(optimizer, parts, milestones=[5])
    assert find_missing_scheduler({"optimizer": optimizer, "scheduler": wrap(scheduler)}) is None

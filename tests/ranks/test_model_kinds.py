"""Built-in models other than the decoder, and a custom model, train the same on two ranks with small micro-batches as
on one process with one micro-batch per step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = pytest.mark.ranks

STEPS = 4
# Limits of the parity table for fp32 (tests/harness/parity/cells.py).
LOSS, NORM = 2e-6, 5e-6

MODELS: dict[str, dict[str, Any]] = {
    "convnet": {"kind": "convnet", "convnet": {"width": 8, "blocks": [1, 1], "groups": 4}},
    "two-tower": {"kind": "two-tower", "dropout": 0.1, "two_tower": {"embedding": 16}},
    "entry": {"entry": "perceptron:make", "args": {"width": 24}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"strategy": "single"},
    "ddp": {"strategy": "ddp", "dp_replicate": 2},
    "fsdp": {"strategy": "fsdp", "dp_shard": 2, "activation_checkpointing": "full"},
}

PERCEPTRON = """
import torch
from torch import nn

def make(width):
    return nn.Sequential(nn.Flatten(), Scaled(), nn.Linear(8 * 8 * 3, width),
                         nn.GELU(), nn.Linear(width, 10))

class Scaled(nn.Module):
    def forward(self, x):
        return x / 127.5 - 1
"""


def import_from(folder: str) -> None:
    """Setup: extend the import path as job.sh does."""
    sys.path.insert(0, folder)


def train(folder: Path, model: str, layout: str) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step."""
    data = {"image_size": 8, **({"kind": "images"} if model == "entry" else {})}
    micro = 16 if layout == "one" else 4
    run = make_run(
        folder / layout, "ddp", 1, steps=STEPS, every=STEPS, micro_batch=micro, model=MODELS[model], data=data
    )
    plan = fsio.read_json(run.plan)
    assert isinstance(plan, dict)
    fsio.write_json(run.plan, {**plan, "layout": LAYOUTS[layout]})
    ranks = Ranks(run, 1 if layout == "one" else 2, setup=import_from, args=(str(folder),)).expect(0)
    return list(ranks.losses().values())


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_like_one_process(model: str, tmp_path: Path) -> None:
    (tmp_path / "perceptron.py").write_text(PERCEPTRON)
    single = train(tmp_path, model, "one")
    assert len(single) == STEPS
    for layout in ("ddp", "fsdp"):
        steps = train(tmp_path, model, layout)
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in single], rel=LOSS)
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in single], rel=NORM)

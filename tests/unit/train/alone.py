"""Models as the trainer builds them, on one process."""

from __future__ import annotations

import torch
from torch import nn

from clustertrain.plan.layout import Layout
from clustertrain.train.context import RankContext
from clustertrain.train.mesh import Groups
from clustertrain.train.parallelize import parallelize

CPU = torch.device("cpu")
ALONE = RankContext(0, 0, 1, 1, False, CPU, Layout(), "fp32", None, None, None, None, None)


def built(model: nn.Module, seed: int = 3) -> nn.Module:
    """On the CPU with the values that ``seed`` gives."""
    return parallelize(model, ALONE, Groups(None, None, None, None), seed)

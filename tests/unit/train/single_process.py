"""A context, a model and a process group for tests on a single process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.parallelize import parallelize

CPU = torch.device("cpu")
ALONE = RankContext(0, 0, 1, 1, False, CPU, Layout(), "fp32", None, None, None, None, None)


def build_on_cpu(model: nn.Module, seed: int = 3) -> nn.Module:
    """Return ``model`` on the CPU, initialized from ``seed`` as the trainer does."""
    return parallelize(model, ALONE, ProcessGroups(None, None, None, None), seed)


@contextmanager
def single_process_group() -> Iterator[None]:
    """Open a process group of one process, for code that needs a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

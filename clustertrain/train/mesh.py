"""Process groups and the device mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from clustertrain import settings
from clustertrain.plan.layout import Layout
from clustertrain.train.context import RankContext


@dataclass(frozen=True)
class Groups:
    """``stop`` and ``checkpoint`` are gloo groups of their own: a collective of the training loop in flight on a shared
    group would be matched with theirs. All are None for a process that torchrun did not start."""

    mesh: DeviceMesh | None
    stop: dist.ProcessGroup | None
    checkpoint: dist.ProcessGroup | None


def dimensions(layout: Layout) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the mesh: only degrees above one, and at least one dimension."""
    sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
    used = {k: n for k, n in sizes.items() if n > 1} or {"dp_replicate": 1}
    return tuple(used), tuple(used.values())


def open_groups(context: RankContext, timeout_s: float) -> Groups:
    """Join the other ranks. ``timeout_s`` bounds every collective, and so how long a dead peer can hold this rank."""
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    if not context.launched:
        return Groups(None, None, None)
    timeout = timedelta(seconds=timeout_s)
    cuda = context.device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, device_id=context.device if cuda else None
    )
    names, sizes = dimensions(context.layout)
    mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=names)
    stop = dist.new_group(backend="gloo", timeout=timeout)
    checkpoint = dist.new_group(backend="gloo", timeout=timeout)
    return Groups(mesh, stop, checkpoint)


def close_groups() -> None:
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a group whose peers are gone warns while it is taken down
            dist.destroy_process_group()


def choose_threads(context: RankContext, environ: Mapping[str, str] = os.environ) -> int:
    """CPU threads of one rank: what OMP_NUM_THREADS says, else its share of this machine's cores.

    More threads than cores would not only be slow: OpenMP's threads spin while they wait for each other. The number
    takes part in the order of summation, so it is kept in the checkpoint.
    """
    asked = environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    # The local backend's nodes are all on this machine.
    here = context.world_size if settings.LOCAL_JOB in environ else context.local_world_size
    return max(1, len(os.sched_getaffinity(0)) // here)

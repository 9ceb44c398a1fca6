"""Process groups and the device mesh: the one place that turns a Layout into them."""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from clustertrain import reading, settings
from clustertrain.errors import UsageError
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext

_session_ids = itertools.count(1)  # of this process


@dataclass(frozen=True)
class ProcessGroups:
    """``stop`` and ``checkpoint`` are gloo groups of their own: a collective of the training loop in flight on a shared
    group would be matched with theirs. All are None for a process that torchrun did not start.

    ``mesh`` has the dimensions of :func:`mesh_dimensions`. ``cp_mesh`` is the one-dimensional mesh of the ranks that
    share a
    sequence; it is a mesh of its own because those ranks also take part in ``mesh``'s data-parallel dimensions, where
    gradients are averaged and parameters sharded over them.
    """

    mesh: DeviceMesh | None
    cp_mesh: DeviceMesh | None
    stop: dist.ProcessGroup | None
    checkpoint: dist.ProcessGroup | None

    def tp_mesh(self) -> DeviceMesh | None:
        return self._submesh("tp")

    def pp_mesh(self) -> DeviceMesh | None:
        return self._submesh("pp")

    def dp_mesh(self) -> DeviceMesh | None:
        """One dimension to shard over, or two: replicate over the first, shard over the second."""
        if self.mesh is None:
            return None
        names = tuple(n for n in self.mesh.mesh_dim_names or () if n.startswith("dp_"))
        return self.mesh[names] if names else None

    def _submesh(self, name: str) -> DeviceMesh | None:
        return self.mesh[name] if self.mesh is not None and name in (self.mesh.mesh_dim_names or ()) else None


def mesh_dimensions(layout: Layout) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the mesh, outermost first: only degrees above one, and at least one dimension.

    Ranks that share a sequence stand in the data-parallel dimension that is the innermost one in use, since parameters
    and gradients do not know which part of a sequence they come from. A product with plain replicas has a ``dp_shard``
    of size 1, so that ``fully_shard`` replicates: DDP does not know DTensors and stages.
    """
    replicate, shard = layout.dp_replicate, layout.dp_shard
    if layout.is_sharded:
        shard *= layout.cp
    else:
        replicate *= layout.cp
    sizes = {"pp": layout.pp, "dp_replicate": replicate, "dp_shard": shard, "tp": layout.tp}
    active = {k: n for k, n in sizes.items() if n > 1}
    if layout.is_model_parallel and replicate > 1 and shard == 1:
        active = {k: n for k, n in sizes.items() if n > 1 or k == "dp_shard"}
    active = active or {"dp_replicate": 1}
    return tuple(active), tuple(active.values())


@functools.cache
def _rendezvous_store(timeout: timedelta) -> Store:
    """Kept for all sessions of this process: a store that rank 0 serves must not end with the first of them, while
    other ranks are at it for the next."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store


def open_groups(context: RankContext, timeout_s: float) -> ProcessGroups:
    """Join the other ranks. ``timeout_s`` bounds every collective, and so how long a dead peer can hold this rank.

    Raises:
        UsageError: there are groups already, the script's own or of another session.
    """
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    if not context.launched_by_torchrun:
        return ProcessGroups(None, None, None, None)
    timeout = timedelta(seconds=timeout_s)
    cuda = context.device.type == "cuda"
    if dist.is_initialized():
        raise UsageError(
            "session: torch.distributed is initialised already",
            fix="leave it to the session, which does it by itself, and open none inside another or after one that "
            "failed",
        )
    # torch numbers the groups of each session from 0. Under the same names in the store a rank would find the addresses
    # at which its peers were in the session before, and wait for them there.
    store = PrefixStore(f"session-{next(_session_ids)}", _rendezvous_store(timeout))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=context.device if cuda else None,
    )
    layout, device = context.layout, context.device.type
    names, sizes = mesh_dimensions(layout)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
    cp_mesh = None
    if layout.cp > 1:
        sizes = (layout.world_size // (layout.cp * layout.tp), layout.cp, layout.tp)
        cp_mesh = init_device_mesh(device, sizes, mesh_dim_names=("outer", "cp", "inner"))["cp"]
    stop = dist.new_group(backend="gloo", timeout=timeout)
    checkpoint = dist.new_group(backend="gloo", timeout=timeout)
    return ProcessGroups(mesh, cp_mesh, stop, checkpoint)


def build_shard_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks over which parameters are sharded, whether by data or by tensor parallel; None: this one alone.
    Collective over all ranks where it is by both."""
    names = mesh.mesh_dim_names or ()
    dims = [i for i, n in enumerate(names) if n in ("dp_shard", "tp") and mesh.size(i) > 1]
    if len(dims) <= 1:
        return mesh.get_group(dims[0]) if dims else None
    last = tuple(range(mesh.ndim - len(dims), mesh.ndim))
    own_group = None
    for ranks in mesh.mesh.movedim(dims, last).flatten(last[0]).reshape(-1, math.prod(map(mesh.size, dims))).tolist():
        group = dist.new_group(ranks)
        own_group = group if dist.get_rank() in ranks else own_group
    return own_group


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
    omp_threads = environ.get("OMP_NUM_THREADS", "")
    return (
        int(omp_threads)
        if reading.is_unsigned_int(omp_threads) and int(omp_threads) > 0
        else cores_per_rank(context, environ)
    )


def cores_per_rank(context: RankContext, environ: Mapping[str, str] = os.environ) -> int:
    """This rank's share of this machine's cores."""
    # The local backend's nodes are all on this machine.
    local_ranks = context.world_size if settings.LOCAL_JOB in environ else context.local_world_size
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)

"""Process groups and the device mesh, built from a Layout."""

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
from clustertrain.checkpoint.core.control_group import ControlGroup
from clustertrain.errors import UsageError
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext

# torch's errors if a script calls init_process_group in a session, and what they mean there.
_INIT_ERRORS = {
    "trying to initialize the default process group twice": "ct.session() has already initialized torch.distributed",
    "Error initializing torch.distributed using env://": "a session of one process needs no process group",
}
_session_ids = itertools.count(1)  # numbers the sessions of this process


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of a session; all None for a process that torchrun did not start.

    ``stop`` and ``checkpoint`` are separate control groups: on a shared one, their operations could be matched with
    each other's.
    """

    mesh: DeviceMesh | None
    """Mesh with the dimensions of :func:`mesh_dimensions`."""
    cp_mesh: DeviceMesh | None
    """One-dimensional mesh of the ranks that share a sequence. It is separate, because those ranks are also in
    ``mesh``'s data-parallel dimensions, which average gradients and shard parameters."""
    stop: ControlGroup | None
    checkpoint: ControlGroup | None

    def tp_mesh(self) -> DeviceMesh | None:
        return self._submesh("tp")

    def pp_mesh(self) -> DeviceMesh | None:
        return self._submesh("pp")

    def dp_mesh(self) -> DeviceMesh | None:
        """Return the data-parallel mesh.

        It has one dimension, or two: replicate over the first and shard over the second.
        """
        if self.mesh is None:
            return None
        names = tuple(n for n in self.mesh.mesh_dim_names or () if n.startswith("dp_"))
        return self.mesh[names] if names else None

    def _submesh(self, name: str) -> DeviceMesh | None:
        return self.mesh[name] if self.mesh is not None and name in (self.mesh.mesh_dim_names or ()) else None


def mesh_dimensions(layout: Layout) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and sizes of the mesh dimensions, outermost first: degrees above one, and at least one dimension.

    Ranks that share a sequence belong to the innermost data-parallel dimension in use, because they need the same
    parameters, whichever part of the sequence they hold. Plain replicas combined with model parallelism get a
    ``dp_shard`` of size 1, so that ``fully_shard`` replicates them; DDP supports neither DTensors nor stages.
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
    """Return the store for all sessions of this process.

    The store that rank 0 serves must not end with the first session, because other ranks use it for the next.
    """
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store


def open_groups(context: RankContext, timeout_s: float) -> ProcessGroups:
    """Initialize torch.distributed and create the process groups. Collective over all ranks.

    Args:
        timeout_s: bounds every collective, and thus how long a dead peer can block this rank.

    Raises:
        UsageError: torch.distributed is already initialized, by the script or another session.
    """
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    if not context.launched_by_torchrun:
        return ProcessGroups(None, None, None, None)
    timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        raise UsageError(
            "session: torch.distributed is already initialized",
            fix="delete the script's init_process_group call, because the session makes it; do not open a session "
            "inside another or after a failed one",
        )
    # torch numbers the groups of each session from 0. Without the prefix, a rank would find its peers' addresses from
    # the previous session in the store and wait for them.
    store = PrefixStore(f"session-{next(_session_ids)}", _rendezvous_store(timeout))
    _init_default_group(context, store, timeout)
    layout, device = context.layout, context.device.type
    names, sizes = mesh_dimensions(layout)
    mesh = _init_mesh(device, sizes, names, timeout)
    cp_mesh = None
    if layout.cp > 1:
        sizes = (layout.world_size // (layout.cp * layout.tp), layout.cp, layout.tp)
        cp_mesh = _init_mesh(device, sizes, ("outer", "cp", "inner"), timeout)["cp"]
    stop, checkpoint = (
        ControlGroup(PrefixStore(name, store), context.rank, context.world_size, timeout)
        for name in ("stop", "checkpoint")
    )
    return ProcessGroups(mesh, cp_mesh, stop, checkpoint)


def explain_second_init(error: BaseException) -> None:
    """Add what to do to torch's error about ``init_process_group`` in a session; ignore other errors."""
    for text, meaning in _INIT_ERRORS.items():
        if isinstance(error, ValueError) and text in str(error):
            error.add_note(
                f"{meaning}\n  fix: delete the script's call of init_process_group, and that of destroy_process_group"
            )


def _init_default_group(context: RankContext, store: Store, timeout: timedelta) -> None:
    on_cuda = context.device.type == "cuda"
    # With offload, DTensors of the CPU are reduced too.
    backend = "gloo" if not on_cuda else "cpu:gloo,cuda:nccl" if context.layout.offload else "nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=context.device if on_cuda else None,
    )
    if on_cuda and context.layout.offload:
        # torch 2.13 splits the gloo half of a group by these ranks, and leaves them empty in the default group.
        gloo = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        gloo.options.global_ranks_in_group = list(range(context.world_size))


def _init_mesh(device: str, sizes: tuple[int, ...], names: tuple[str, ...], timeout: timedelta) -> DeviceMesh:
    """Return a new mesh whose groups have ``timeout``; ``init_device_mesh`` would give them torch's default."""
    mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        for device_type in group._device_types:
            group._get_backend(device_type)._set_default_timeout(timeout)
    return mesh


def build_shard_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of ranks that shard parameters, by data or tensor parallelism; None means only this rank.

    Collective over all ranks if both are in use.
    """
    names = mesh.mesh_dim_names or ()
    dims = [i for i, n in enumerate(names) if n in ("dp_shard", "tp") and mesh.size(i) > 1]
    if len(dims) <= 1:
        return mesh.get_group(dims[0]) if dims else None
    last = tuple(range(mesh.ndim - len(dims), mesh.ndim))
    local_group = None
    timeout = mesh.get_group(0)._get_backend(torch.device(mesh.device_type)).options._timeout
    for ranks in mesh.mesh.movedim(dims, last).flatten(last[0]).reshape(-1, math.prod(map(mesh.size, dims))).tolist():
        group = dist.new_group(ranks, timeout=timeout)
        local_group = group if dist.get_rank() in ranks else local_group
    return local_group


def close_groups(groups: ProcessGroups) -> None:
    """Close the groups of a session, on which no operation is in flight."""
    for control_group in (groups.stop, groups.checkpoint):
        if control_group is not None:
            control_group.close()
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # destroying a group whose peers have exited warns
            dist.destroy_process_group()


def choose_threads(context: RankContext, environ: Mapping[str, str] = os.environ) -> int:
    """Return the CPU threads of one rank: OMP_NUM_THREADS, or its share of this machine's cores.

    More threads than cores are disproportionately slow, because OpenMP threads spin while waiting. The number affects
    the order of summation, so the checkpoint stores it.
    """
    omp_threads = environ.get("OMP_NUM_THREADS", "")
    return (
        int(omp_threads)
        if reading.is_unsigned_int(omp_threads) and int(omp_threads) > 0
        else cores_per_rank(context, environ)
    )


def cores_per_rank(context: RankContext, environ: Mapping[str, str] = os.environ) -> int:
    """Return this rank's share of this machine's cores."""
    # All nodes of the local backend are on this machine.
    local_ranks = context.world_size if settings.LOCAL_JOB in environ else context.local_world_size
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)

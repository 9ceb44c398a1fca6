"""Stand-ins for what other ranks would send: torch's fake backend moves nothing, and some code reads what arrives.

They replace private functions of torch 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import (
    _derive_grad_metas,
    _StageBackwardMeta,
    _StageForwardMeta,
    _TensorMeta,
)
from torch.distributed.tensor import _utils as dtensor_utils
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from clustertrain.checkpoint.core import state_dict
from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import mesh, pipeline_stages
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.pipeline import Pipeline
from clustertrain.train.optim.unsharded_update import ShardSlice, UnshardedOptimizer
from clustertrain.train.step.train_step import TrainStep


@contextlib.contextmanager
def open_groups(context: RankContext) -> Iterator[ProcessGroups]:
    """Open the trainer's process groups with torch's fake backend in place of NCCL and gloo."""
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init_fake(backend: str, *, rank: int, world_size: int, **_: Any) -> None:
        init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_fake(ranks: Any = None, **_: Any) -> Any:
        return new_group(ranks)

    with (
        mock.patch.object(dist, "init_process_group", init_fake),
        mock.patch.object(dist, "new_group", new_fake),
        mock.patch.object(mesh, "_rendezvous_store", lambda timeout: FakeStore()),
        mock.patch.object(mesh, "ControlGroup", lambda *args: None),  # not used in a step
        mock.patch.object(FakeProcessGroup, "options", SimpleNamespace(_timeout=timedelta(seconds=60))),
        mock.patch.object(FakeProcessGroup, "_set_default_timeout", lambda *args: None, create=True),
    ):
        groups = mesh.open_groups(context, 60.0)
        try:
            yield groups
        finally:
            mesh.close_groups(groups)


@contextlib.contextmanager
def replace_messages(stage_inputs: tuple[tuple[int, ...], torch.dtype]) -> Iterator[list[tuple[tuple[int, ...], Any]]]:
    """Replace what is read from other ranks; yield a list of (shape, dtype) that pipeline stages send to the next one.

    Args:
        stage_inputs: shape and dtype of what a pipeline stage receives from the previous one.
    """
    sent: list[tuple[tuple[int, ...], Any]] = []
    shape, dtype = stage_inputs
    hidden = _TensorMeta.from_tensor(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True))

    def receive_meta(stage: PipelineStage, source: int) -> Any:
        if source < stage.stage_index:
            return _StageForwardMeta(forward_metas=(hidden,))
        return _StageBackwardMeta(backward_metas=_derive_grad_metas(stage._stage_meta.outputs))

    def send_meta(stage: PipelineStage, meta: Any, target: int) -> None:
        if target > stage.stage_index:
            sent.extend((tuple(m.shape), m.dtype) for m in meta.forward_metas)

    with (
        mock.patch.object(PipelineStage, "_recv_meta", receive_meta),
        mock.patch.object(PipelineStage, "_send_meta", send_meta),
        # All stages infer their shapes.
        mock.patch.object(
            PipelineStage,
            "_warmup_backward_result",
            lambda stage, received_result=None: SimpleNamespace(item=lambda: 0),
        ),
        mock.patch.object(mesh, "build_shard_group", _outside_modes(mesh.build_shard_group)),
        mock.patch.object(UnshardedOptimizer, "_gather_slices", _slices_of_all_ranks),
        mock.patch.object(
            DeviceMesh, "_compute_coordinate_on_dim", _outside_modes(DeviceMesh._compute_coordinate_on_dim)
        ),
        mock.patch.object(DeviceMesh, "mesh", property(_outside_modes(_mesh_tensor))),
        mock.patch.object(
            pipeline_stages,
            "split_into_stages",
            _outside_modes(pipeline_stages.split_into_stages),  # it copies the model
        ),
        mock.patch.object(Pipeline, "_build_schedule", _build_schedule),
        mock.patch.object(state_dict, "_shard_layout", _outside_modes(state_dict._shard_layout)),
        mock.patch.object(
            dtensor_utils,
            "_compute_local_shape_and_global_offset",
            _outside_modes(dtensor_utils._compute_local_shape_and_global_offset),
        ),
        mock.patch.object(
            TrainStep, "_check_overflow", staticmethod(lambda scale, verdict: scale.update(overflow=False))
        ),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
        mock.patch.object(ddp, "_verify_param_shape_across_processes", lambda *args: None),
        mock.patch.object(ddp.DistributedDataParallel, "__init__", _init_ddp),
    ):
        yield sent


_mesh_tensor: Any = vars(DeviceMesh)["mesh"].fget
_original_build_schedule = Pipeline._build_schedule


def _build_schedule(pipeline: Pipeline, count: int) -> Any:
    """Build the schedule with a loss that knows the numbers of micro-batches, which otherwise are in a fake tensor."""
    schedule = _original_build_schedule(pipeline, count)
    numbers = itertools.chain([0], itertools.cycle(range(count)))  # the first pass infers shapes
    schedule._loss_fn = lambda output, _: pipeline._loss(output, next(numbers))
    return schedule


def _outside_modes(function: Any) -> Any:
    """Return ``function`` without dispatch modes: it reads values, and FakeTensorMode would make its tensors fake."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _slices_of_all_ranks(optimizer: UnshardedOptimizer) -> list[list[ShardSlice]]:
    """Return the slice of each parameter on each rank of the optimizer's group."""
    ranks = [dist.get_rank()] if optimizer._group is None else dist.get_process_group_ranks(optimizer._group)
    return [[_slice_on(p, rank) for p in optimizer._params] for rank in ranks]


def _slice_on(p: torch.Tensor, rank: int) -> ShardSlice:
    if not is_dtensor(p):
        return ShardSlice((0,) * p.dim(), tuple(p.shape))
    with _disable_current_modes():
        coordinate = (p.device_mesh.mesh == rank).nonzero()[0].tolist()
    shape, start = dtensor_utils._compute_local_shape_and_global_offset(
        p.shape, p.device_mesh.shape, coordinate, p.placements
    )
    return ShardSlice(tuple(start), tuple(shape))


class _Chunks:
    """The chunks of a tensor, made when asked for: FSDP needs two of them, and to fake all of 512 takes long."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.size(dim) // count)

    def __getitem__(self, i: int) -> torch.Tensor:
        start = i * self._length
        length = min(self._length, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


class _Reducer:
    """DDP's reducer without its second order of buckets, which rank 0 sends; the new buckets are as large."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


_original_init_ddp = ddp.DistributedDataParallel.__init__


def _init_ddp(model: Any, *args: Any, **kwargs: Any) -> None:
    _original_init_ddp(model, *args, **kwargs)
    model.register_comm_hook(None, _keep_bucket)
    model.reducer = _Reducer(model.reducer)


def _keep_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    """All-reduce in place; the fake backend's result has no value, which the reducer would read."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

"""The objects of a training run as named logical tensors and JSON values.

A logical tensor has a global shape and belongs to no rank. A rank holds all of it if it is replicated, a shard if the
parameter is a DTensor, and nothing if other ranks have it (parameters of another stage, optimizer state with ZeRO-1).
Optimizer state is named after its parameter, not by the parameter's index, so that another layout can load it.
Parameters and optimizer state that are not DTensors are equal on all ranks that hold them. For everything else, the
value of the lowest rank that holds it is saved. State that differs between ranks belongs in the rank state.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain.checkpoint.core import json_tree
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint, TensorKind
from clustertrain.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# Wrappers add these to parameter names; a model has the same logical tensors with and without them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

OPTIMIZER_KEY = "optimizer"  # in a parameter group: the name of its optimizer

StateTree: TypeAlias = Mapping[str, Any]
"""The objects to save, by name: modules, optimizers, other objects with a ``state_dict``, and plain data."""
LoadableState: TypeAlias = dict[str, Any]
"""A :data:`StateTree` to load into. Plain data is replaced, everything else is loaded in place."""


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of a logical tensor."""

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """Offsets of this part in the tensor, one per dimension."""
    local_tensor: torch.Tensor
    """Shares its memory with the live object."""
    placement: Literal["shard", "equal", "first"]
    """
    * shard: the ranks of a mesh hold shards
    * equal: the ranks hold equal copies, any of which may be written
    * first: the ranks hold copies, and the lowest rank's is written
    """
    mesh_root: int = 0
    """The lowest rank of the mesh, for shards."""
    is_replica: bool = False
    """Another rank of the mesh has the same shard and writes it."""
    is_only_copy: bool = False
    """No other rank holds any element of this shard."""
    is_frozen: bool = False
    """A tensor of a module that is not trained, such as a frozen parameter or a buffer. It may change all the same."""


@dataclass(frozen=True)
class CollectedState:
    """The state that this rank holds."""

    shards: list[LocalShard]
    values: dict[str, Any]
    """The JSON values of the state that all ranks share."""
    rank_shards: list[LocalShard]
    """The tensors of this rank's own state."""
    rank_values: Any
    """The JSON values of this rank's own state."""


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    # Importing DTensor takes 0.6 s. If nobody has imported it, no DTensor exists.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def to_local_shard(name: str, kind: TensorKind, value: torch.Tensor) -> LocalShard:
    """Return the part of ``value`` that this rank holds."""
    if not is_dtensor(value):
        return LocalShard(name, kind, tuple(value.shape), (0,) * value.dim(), value.detach(), "equal")
    mesh, placements = value.device_mesh, value.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # this rank is in the mesh
    layout = _shard_layout(mesh, tuple(coordinate), tuple(placements), value.shape)
    with torch.no_grad():  # otherwise autograd records to_local()
        local_tensor = value.to_local().detach()
    return LocalShard(name, kind, tuple(value.shape), local_tensor=local_tensor, placement="shard", **layout)


@functools.lru_cache(maxsize=1 << 16)
def _shard_layout(
    mesh: DeviceMesh, coordinate: tuple[int, ...], placements: tuple[Placement, ...], shape: torch.Size
) -> dict[str, Any]:
    """Return the fields of a shard that depend on its layout. Cached: they take longer than copying a small shard."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    is_replica = any(c > 0 for c, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    is_only_copy = not any(p.is_replicate() or p.is_partial() for p in placements)  # not is_shard(): False if strided
    return {
        "start": tuple(start),
        "mesh_root": int(mesh.mesh.min()),
        "is_replica": is_replica,
        "is_only_copy": is_only_copy,
    }


def unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def model_parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules that have the whole model's parameter names: a pipeline's stages, or the module itself."""
    return list(getattr(module, "pipeline_stages", [unwrap(module)]))


def all_stage_fqns(module: nn.Module) -> frozenset[str]:
    """Return the names in a pipeline's stages on all ranks; empty if each rank holds the whole model."""
    return frozenset(getattr(module, "global_fqns", ()))


def clean_fqn(fqn: str) -> str:
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _fqn_prefixes(state: StateTree) -> dict[str, str]:
    """Return the prefix of parameter names by the module's key; empty for a single module."""
    keys = [k for k, v in state.items() if isinstance(v, nn.Module)]
    return {k: "" if len(keys) == 1 else f"{k}." for k in keys}


def fqns_by_param_id(state: StateTree) -> dict[int, str]:
    """Return the name of each parameter of the modules in ``state``, by the parameter's id()."""
    return {
        id(p): prefix + clean_fqn(fqn)
        for key, prefix in _fqn_prefixes(state).items()
        for part in model_parts(state[key])
        for fqn, p in part.named_parameters()
    }


def all_stage_param_fqns(state: StateTree) -> frozenset[str]:
    """Return :func:`all_stage_fqns` of all modules in ``state``, with the names of :func:`fqns_by_param_id`."""
    return frozenset(p + name for key, p in _fqn_prefixes(state).items() for name in all_stage_fqns(state[key]))


def module_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return parameters, persistent buffers and extra state by name; the tensors are not copied."""
    return {clean_fqn(k): v for part in model_parts(module) for k, v in part.state_dict(keep_vars=True).items()}


def _param_fqns(params: Iterable[torch.Tensor], names: Mapping[int, str], key: str) -> list[str]:
    fqns = []
    for p in params:
        if id(p) not in names:
            raise CheckpointError(
                f"state {key}: the optimizer has a parameter of no module in the state (shape {tuple(p.shape)})",
                fix="put every module that it trains into the state, and create the optimizer after parallelize()",
            )
        fqns.append(names[id(p)])
    return fqns


@dataclass(frozen=True)
class WrappedOptimizer:
    """An optimizer that has state on this rank."""

    optimizer: torch.optim.Optimizer
    model_params: Mapping[int, torch.Tensor] | None = None
    """The model's parameter by the id() of the optimizer's. None: both have the same parameters."""

    @property
    def params(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def model_param(self, p: torch.Tensor) -> torch.Tensor:
        return p if self.model_params is None else self.model_params[id(p)]


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[WrappedOptimizer]:
    """Return the optimizers that have the state of this rank's parameters.

    This is ``optimizer`` itself, the inner optimizer of ZeRO-1, which has only the parameters that this rank updates,
    or the result of the optimizer's method ``inner_optimizers``.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return inner_optimizers(optimizer.optim)
    get_inner = getattr(optimizer, "inner_optimizers", None)
    return get_inner() if callable(get_inner) else [WrappedOptimizer(optimizer)]


def optimizer_state_dict(optimizer: torch.optim.Optimizer, names: Mapping[int, str], key: str) -> dict[str, Any]:
    """Return the parameter groups with names, and by name the state of each parameter that has state on this rank."""
    groups = [{**_unwrap_scalars(g), "params": _param_fqns(g["params"], names, key)} for g in optimizer.param_groups]
    state: dict[str, Any] = {}
    for inner in inner_optimizers(optimizer):
        params = [p for p in inner.params if p in inner.optimizer.state]
        fqns = _param_fqns(map(inner.model_param, params), names, key)
        state.update((name, inner.optimizer.state[p]) for name, p in zip(fqns, params, strict=True))
    return {"groups": groups, "state": state}


def _unwrap_scalars(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with 0-dimensional tensors as numbers: such a tensor has no name shared by all ranks."""
    return {k: v.item() if isinstance(v, torch.Tensor) and v.dim() == 0 else v for k, v in group.items()}


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name.

    Raises:
        DamagedCheckpoint: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{name!r} is not a dtype")
    return dtype


def tensor_kind(value: object) -> TensorKind:
    if isinstance(value, nn.Module):
        return "model"
    return "optimizer" if isinstance(value, torch.optim.Optimizer) else "other"


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def collect_state(state: StateTree, rank_state: StateTree, rank: int) -> CollectedState:
    """Return the part of ``state`` that this rank holds, and its own ``rank_state``.

    Raises:
        CheckpointError: an object cannot be stored.
    """
    names = fqns_by_param_id(state)
    values: dict[str, Any] = {}
    shards: list[LocalShard] = []
    for key, value in state.items():
        if isinstance(value, nn.Module):
            content: Any = module_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            content = optimizer_state_dict(value, names, key)
        else:
            content = value.state_dict() if is_stateful(value) else value
        tensors: dict[str, torch.Tensor] = {}
        values[key] = json_tree.encode(content, key, tensors)
        for name, t in tensors.items():
            shard = to_local_shard(name, tensor_kind(value), t)
            if shard.placement == "equal" and not _is_identical_on_ranks(value, t):
                shard = replace(shard, placement="first")
            if isinstance(value, nn.Module) and not t.requires_grad:
                shard = replace(shard, is_frozen=True)
            shards.append(shard)
    rank_tensors: dict[str, torch.Tensor] = {}
    # The names contain the rank: under a shared name, one rank's random state would be saved for all.
    rank_values = json_tree.encode(rank_state, f"rank-{rank}", rank_tensors)
    return CollectedState(
        shards, values, [to_local_shard(name, "other", t) for name, t in rank_tensors.items()], rank_values
    )


def _is_identical_on_ranks(owner: object, tensor: torch.Tensor) -> bool:
    if isinstance(owner, nn.Module):
        # Not its buffers: DDP sends rank 0's to the others at the next forward, and until then the others' are stale.
        return isinstance(tensor, nn.Parameter)
    return isinstance(owner, torch.optim.Optimizer)

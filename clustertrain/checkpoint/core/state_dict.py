"""The objects of a training run as named logical tensors and JSON values, and back.

A logical tensor has a global shape and belongs to no rank. A rank holds a block of it: the whole where it is
replicated, a shard where the parameter is a DTensor, and nothing where other ranks have it (another stage's parameters,
ZeRO-1's optimizer state). Optimizer state is named by the parameter it belongs to, never by the parameter's index, so
that it survives another layout. Parameters and optimizer state that are no DTensors are equal on all ranks that hold
them; of everything else the lowest such rank's counts. What must differ from rank to rank goes into the rank state.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain.checkpoint.core import json_tree
from clustertrain.checkpoint.format.manifest import Damaged, Kind
from clustertrain.errors import CheckpointError

# What wrappers put into parameter names; the same model with and without them has the same logical tensors.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


OPTIMIZER = "optimizer"  # in a parameter group: the name of what its state is of


@dataclass(frozen=True)
class Block:
    """This rank's part of a logical tensor. ``local`` shares its memory with the live object.

    ``held`` says how it lies on the ranks that hold it: as ``shard``s of a mesh whose lowest rank is ``root``; as
    ``equal`` copies, any of which may be written; or as copies of which the ``first`` rank's counts. ``replica`` is a
    shard that another rank of the mesh has too and writes; of an ``only`` one no other rank has anything.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local: torch.Tensor
    held: Literal["shard", "equal", "first"]
    root: int = 0
    replica: bool = False
    only: bool = False


@dataclass(frozen=True)
class Collected:
    """``values`` is the JSON tree of what all ranks share, ``own`` that of this rank, with the tensors ``private``."""

    blocks: list[Block]
    values: dict[str, Any]
    private: list[Block]
    own: Any


def is_dtensor(value: Any) -> bool:
    # Importing DTensor takes 0.6 s, and without the import there can be none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def block(name: str, kind: Kind, value: torch.Tensor) -> Block:
    """The part of ``value`` that this rank holds."""
    if not is_dtensor(value):
        return Block(name, kind, tuple(value.shape), (0,) * value.dim(), value.detach(), "equal")
    mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
    place = _place(mesh, tuple(mesh.get_coordinate()), tuple(placements), value.shape)
    with torch.no_grad():  # else the shard is made by a function of autograd's
        local = value.to_local().detach()  # type: ignore[attr-defined]
    return Block(name, kind, tuple(value.shape), local=local, held="shard", **place)


@functools.lru_cache(maxsize=1 << 16)
def _place(mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...], shape: torch.Size) -> dict[str, Any]:
    """What a block has of how its tensor is laid out. It takes longer to find out than a small shard takes to copy."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    replica = any(c > 0 for c, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    only = not any(p.is_replicate() or p.is_partial() for p in placements)  # is_shard() knows no strided ones
    return {"start": tuple(start), "root": int(mesh.mesh.min()), "replica": replica, "only": only}


def unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def parts(module: nn.Module) -> list[nn.Module]:
    """The modules on this rank whose names are those of the whole model: a pipeline's stages, else the one there is."""
    return list(getattr(module, "pipeline_stages", [unwrap(module)]))


def names_of_whole(module: nn.Module) -> frozenset[str]:
    """What a pipeline's stages hold on all ranks together; empty where each rank holds all."""
    return frozenset(getattr(module, "whole_names", ()))


def clean(fqn: str) -> str:
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _prefixes(state: Mapping[str, Any]) -> dict[str, str]:
    """What stands before a parameter's name, by the key of the module."""
    keys = [k for k, v in state.items() if isinstance(v, nn.Module)]
    return {k: "" if len(keys) == 1 else f"{k}." for k in keys}


def parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of the modules in ``state``, by the parameter's id()."""
    return {
        id(p): prefix + clean(fqn)
        for key, prefix in _prefixes(state).items()
        for part in parts(state[key])
        for fqn, p in part.named_parameters()
    }


def parameters_of_whole(state: Mapping[str, Any]) -> frozenset[str]:
    """:func:`names_of_whole` of all modules in ``state``, as :func:`parameter_names` names them."""
    return frozenset(p + name for key, p in _prefixes(state).items() for name in names_of_whole(state[key]))


def module_state(module: nn.Module) -> dict[str, Any]:
    """Parameters, persistent buffers and extra state by name; the tensors are the live ones."""
    return {clean(k): v for part in parts(module) for k, v in part.state_dict(keep_vars=True).items()}


def _names_of(params: Iterable[torch.Tensor], names: Mapping[int, str], key: str) -> list[str]:
    found = []
    for p in params:
        if id(p) not in names:
            raise CheckpointError(
                f"state {key}: the optimizer holds a parameter (shape {tuple(p.shape)}) of no module in the state",
                fix="put every module that it trains into the state, and make the optimizer after parallelize()",
            )
        found.append(names[id(p)])
    return found


@dataclass(frozen=True)
class Kept:
    """An optimizer that has state on this rank. ``outer``: by id() of its parameters the model's parameter that each
    stands for; None: they are the model's own."""

    optimizer: torch.optim.Optimizer
    outer: Mapping[int, torch.Tensor] | None = None

    @property
    def params(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def of(self, p: torch.Tensor) -> torch.Tensor:
        return p if self.outer is None else self.outer[id(p)]


def keepers(optimizer: torch.optim.Optimizer) -> list[Kept]:
    """The optimizers that have the state of this rank's parameters: ``optimizer`` itself, ZeRO-1's one inside, which is
    over those it updates, or what an optimizer made of others names in a method ``keepers``."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return keepers(optimizer.optim)
    inside = getattr(optimizer, "keepers", None)
    return inside() if callable(inside) else [Kept(optimizer)]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str], key: str) -> dict[str, Any]:
    """Groups with parameters by name, and by name the state of each parameter that has one on this rank."""
    groups = [{**_plain(g), "params": _names_of(g["params"], names, key)} for g in optimizer.param_groups]
    state: dict[str, Any] = {}
    for kept in keepers(optimizer):
        params = [p for p in kept.params if p in kept.optimizer.state]
        of_kept = _names_of(map(kept.of, params), names, key)
        state.update((name, kept.optimizer.state[p]) for name, p in zip(of_kept, params, strict=True))
    return {"groups": groups, "state": state}


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with its single numbers as such: a learning rate kept in a tensor has no name that all ranks share."""
    return {k: v.item() if isinstance(v, torch.Tensor) and v.dim() == 0 else v for k, v in group.items()}


def dtype_of(name: str) -> torch.dtype:
    """Raises Damaged for what is no type of torch's."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Damaged(f"{name!r} is no type of a tensor")
    return found


def kind_of(value: Any) -> Kind:
    if isinstance(value, nn.Module):
        return "model"
    return "optimizer" if isinstance(value, torch.optim.Optimizer) else "other"


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def collect(state: Mapping[str, Any], rank_state: Mapping[str, Any], rank: int) -> Collected:
    """What this rank holds of ``state``, and its own ``rank_state``.

    Raises:
        CheckpointError: something that cannot be stored.
    """
    names = parameter_names(state)
    values: dict[str, Any] = {}
    blocks: list[Block] = []
    for key, value in state.items():
        if isinstance(value, nn.Module):
            content: Any = module_state(value)
        elif isinstance(value, torch.optim.Optimizer):
            content = optimizer_state(value, names, key)
        else:
            content = value.state_dict() if is_stateful(value) else value
        tensors: dict[str, torch.Tensor] = {}
        values[key] = json_tree.encode(content, key, tensors)
        for name, t in tensors.items():
            found = block(name, kind_of(value), t)
            if found.held == "equal" and not _equal_on_all_ranks(value, t):
                found = replace(found, held="first")
            blocks.append(found)
    own: dict[str, torch.Tensor] = {}
    # Rank-unique names: one name for all would keep one rank's random numbers for everybody.
    own_values = json_tree.encode(rank_state, f"rank-{rank}", own)
    return Collected(blocks, values, [block(name, "other", t) for name, t in own.items()], own_values)


def _equal_on_all_ranks(owner: Any, tensor: torch.Tensor) -> bool:
    if isinstance(owner, nn.Module):
        # Not its buffers: DDP sends rank 0's to the others at the next forward, and until then the others' are stale.
        return isinstance(tensor, nn.Parameter)
    return isinstance(owner, torch.optim.Optimizer)

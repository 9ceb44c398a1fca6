"""The objects of a training run as named logical tensors and JSON values, and back.

A logical tensor has a global shape and belongs to no rank. A rank holds a block of it: the whole where it is
replicated, a shard where the parameter is a DTensor. Optimizer state is named by the parameter it belongs to, never by
the parameter's index, so that it survives another layout. Parameters and optimizer state that are no DTensors are equal
on all ranks; of everything else rank 0's counts. What must differ from rank to rank goes into the rank state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain.checkpoint import tree
from clustertrain.checkpoint.manifest import Kind
from clustertrain.errors import CheckpointError

# What wrappers put into parameter names; the same model with and without them has the same logical tensors.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Block:
    """This rank's part of a logical tensor. ``local`` shares its memory with the live object.

    ``writer`` is whether this rank writes it; None for a replicated tensor, of which one rank is still to be chosen.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local: torch.Tensor
    writer: bool | None


def is_dtensor(value: Any) -> bool:
    # Importing DTensor takes 0.6 s, and without the import there can be none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def block(name: str, kind: Kind, value: torch.Tensor) -> Block:
    """The part of ``value`` that this rank holds."""
    value = value.detach()
    if not is_dtensor(value):
        return Block(name, kind, tuple(value.shape), (0,) * value.dim(), value, None)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
    _, start = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    writer = all(c == 0 for c, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    return Block(name, kind, tuple(value.shape), tuple(start), value.to_local(), writer)  # type: ignore[attr-defined]


def unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def clean(fqn: str) -> str:
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of the modules in ``state``, by the parameter's id()."""
    modules = {k: unwrap(v) for k, v in state.items() if isinstance(v, nn.Module)}
    return {
        id(p): clean(fqn) if len(modules) == 1 else f"{key}.{clean(fqn)}"
        for key, module in modules.items()
        for fqn, p in module.named_parameters()
    }


def module_state(module: nn.Module) -> dict[str, Any]:
    """Parameters, persistent buffers and extra state by name; the tensors are the live ones."""
    return {clean(k): v for k, v in unwrap(module).state_dict(keep_vars=True).items()}


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


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str], key: str) -> dict[str, Any]:
    """Groups with parameters by name, and the state of each parameter by name."""
    groups = [{**g, "params": _names_of(g["params"], names, key)} for g in optimizer.param_groups]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    return {
        "groups": groups,
        "state": {n: optimizer.state[p] for n, p in zip(_names_of(params, names, key), params, strict=True)},
    }


def kind_of(value: Any) -> Kind:
    if isinstance(value, nn.Module):
        return "model"
    return "optimizer" if isinstance(value, torch.optim.Optimizer) else "other"


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def collect(
    state: Mapping[str, Any], rank_state: Mapping[str, Any], rank: int, world_size: int
) -> tuple[list[Block], dict[str, Any], Any]:
    """This rank's blocks to write, the JSON values common to all ranks, and those of this rank.

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
        values[key] = tree.encode(content, key, tensors)
        for name, t in tensors.items():
            found = block(name, kind_of(value), t)
            if found.writer is None and not _equal_on_all_ranks(value, t):
                found = replace(found, writer=rank == 0)
            blocks.append(found)
    own: dict[str, torch.Tensor] = {}
    # Rank-unique names: one name for all would keep one rank's random numbers for everybody.
    own_values = tree.encode(rank_state, f"rank-{rank}", own)
    private = [block(name, "other", t) for name, t in own.items()]
    return [*_mine(blocks, rank, world_size), *private], values, own_values


def _equal_on_all_ranks(owner: Any, tensor: torch.Tensor) -> bool:
    if isinstance(owner, nn.Module):
        # Not its buffers: DDP sends rank 0's to the others at the next forward, and until then the others' are stale.
        return isinstance(tensor, nn.Parameter)
    return isinstance(owner, torch.optim.Optimizer)


def _mine(blocks: list[Block], rank: int, world_size: int) -> list[Block]:
    """The blocks that this rank writes: its shards, and a fair share of what is replicated (by bytes)."""
    load = [0] * world_size
    owner: dict[str, int] = {}
    replicated = [b for b in blocks if b.writer is None]
    for b in sorted(replicated, key=lambda b: (-b.local.nbytes, b.name)):
        owner[b.name] = min(range(world_size), key=load.__getitem__)
        load[owner[b.name]] += b.local.nbytes
    return [b for b in blocks if (owner[b.name] == rank if b.writer is None else b.writer)]

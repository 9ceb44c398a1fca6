"""Updates that need full parameters, for sharded parameters.

Norms, factored moments, matrices and 8-bit blocks of a shard differ from those of the full parameter. Each parameter
therefore has an owner among the ranks that share it. The owner gathers its gradient and value, holds its optimizer
state, updates it, and sends each rank its shard. The two all-to-all exchanges per step move twice the data of the
gradient reduction; the state is spread as evenly as full parameters allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from clustertrain.checkpoint.core.state_dict import WrappedOptimizer, is_dtensor, to_local_shard
from clustertrain.train.optim.wrapper import CompositeOptimizer, OptimizerFactory, ParamGroups


class ShardSlice(NamedTuple):
    """Position of a rank's shard in a parameter."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each parameter: largest first, each to the rank with the least so far."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(ranks), key=lambda r: (load[r], r))
        load[owners[i]] += sizes[i]
    return owners


def _placeholder(p: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's shape and dtype that uses the memory of one element."""
    return torch.zeros((), dtype=p.dtype, device=_local_shard(p).device).expand(p.shape)


def _local_shard(value: Any) -> torch.Tensor:
    return to_local_shard("", "optimizer", value).local_tensor


class UnshardedOptimizer(CompositeOptimizer):
    """An optimizer over full parameters, each on its owner.

    All ranks of ``group`` step together and must agree on which parameters have gradients, as ``fully_shard`` requires.
    """

    def __init__(self, groups: ParamGroups, make: OptimizerFactory, group: dist.ProcessGroup | None) -> None:
        """Assign owners. Collective.

        Args:
            make: builds the optimizer from groups of this rank's full parameters; some may be empty.
            group: ranks that share the parameters; None means only this one.
        """
        super().__init__(groups)
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._ranks = dist.get_world_size(self._group) if self._group is not None else 1
        self._rank = dist.get_rank(self._group) if self._group is not None else 0
        self._params: list[torch.Tensor] = [p for g in self.param_groups for p in g["params"]]
        self._owners = assign_owners([p.numel() for p in self._params], self._ranks)
        self._rank_slices = self._gather_slices()
        self._senders = [_find_senders([slices[i] for slices in self._rank_slices]) for i in range(len(self._params))]
        owned = [i for i, owner in enumerate(self._owners) if owner == self._rank]
        self._full_params = {i: torch.nn.Parameter(_placeholder(self._params[i])) for i in owned}
        param_index = {id(p): i for i, p in enumerate(self._params)}
        inner_groups = [
            {
                **g,
                "params": [
                    self._full_params[param_index[id(p)]]
                    for p in g["params"]
                    if param_index[id(p)] in self._full_params
                ],
            }
            for g in self.param_groups
        ]
        self._add_inner(make(inner_groups), range(len(self.param_groups)))

    def _gather_slices(self) -> list[list[ShardSlice]]:
        """Return the slice of each parameter on each rank, by rank."""
        local_slices = []
        for p in self._params:
            local_block = to_local_shard("", "optimizer", p)
            local_slices.append(ShardSlice(local_block.start, tuple(local_block.local_tensor.shape)))
        if self._group is None:
            return [local_slices]
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, local_slices, group=self._group)
        return gathered

    def inner_optimizers(self) -> list[WrappedOptimizer]:
        sharded_params = {id(full_param): self._params[i] for i, full_param in self._full_params.items()}
        return [
            WrappedOptimizer(inner.optimizer, {id(p): sharded_params[id(inner.model_param(p))] for p in inner.params})
            for inner in super().inner_optimizers()
        ]

    def _update(self) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, p in enumerate(self._params):
            if p.grad is not None:
                by_dtype.setdefault(p.dtype, []).append(i)
        for dtype, indices in by_dtype.items():
            values = self._gather(indices, [_local_shard(self._params[i]) for i in indices], dtype)
            grads = self._gather(indices, [_local_gradient(self._params[i]) for i in indices], dtype)
            for i in values:
                self._full_params[i].data, self._full_params[i].grad = values[i], grads[i]
        super()._update()
        for full_param in self._full_params.values():
            full_param.grad = None  # the buffers of _scatter need its memory
        for dtype, indices in by_dtype.items():
            self._scatter(indices, dtype)
            for i in indices:
                if i in self._full_params:
                    self._full_params[i].data = _placeholder(self._params[i])

    def _gather(self, indices: list[int], shards: list[torch.Tensor], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Return the full tensors that this rank owns among ``indices``, gathered from all ranks' ``shards``."""
        shard_by_index = dict(zip(indices, shards, strict=True))
        send_indices = [
            [i for i in indices if self._owners[i] == r and self._rank in self._senders[i]] for r in range(self._ranks)
        ]
        recv_indices = [
            [i for i in indices if i in self._full_params and r in self._senders[i]] for r in range(self._ranks)
        ]
        chunks = self._all_to_all(
            [[shard_by_index[i] for i in ids] for ids in send_indices],
            [[self._rank_slices[r][i] for i in ids] for r, ids in enumerate(recv_indices)],
            dtype,
        )
        full = {i: torch.empty(self._params[i].shape, dtype=dtype, device=shard_by_index[i].device)
                 for i in indices if i in self._full_params}  # fmt: skip
        for r, ids in enumerate(recv_indices):
            for i, flat in zip(ids, chunks[r], strict=True):
                shard_slice = self._rank_slices[r][i]
                full[i][shard_slice.slices] = flat.view(shard_slice.shape)
        return full

    def _scatter(self, indices: list[int], dtype: torch.dtype) -> None:
        """Send each rank its shard of the full parameters ``indices``."""
        local_slices = self._rank_slices[self._rank]
        owned = [i for i in indices if i in self._full_params]
        recv_indices = [[i for i in indices if self._owners[i] == r] for r in range(self._ranks)]
        chunks = self._all_to_all(
            [[self._full_params[i].detach()[slices[i].slices] for i in owned] for slices in self._rank_slices],
            [[local_slices[i] for i in ids] for ids in recv_indices],
            dtype,
        )
        for ids, flats in zip(recv_indices, chunks, strict=True):
            for i, flat in zip(ids, flats, strict=True):
                _local_shard(self._params[i]).copy_(flat.view(local_slices[i].shape))

    def _all_to_all(
        self, outgoing: list[list[torch.Tensor]], expected: list[list[ShardSlice]], dtype: torch.dtype
    ) -> list[list[torch.Tensor]]:
        """Send the tensors ``outgoing[r]`` to rank r; return those received from each rank, flattened."""
        if self._group is None:
            return [[t.reshape(-1) for t in outgoing[0]]]
        device = _local_shard(self._params[0]).device
        flat = [t.reshape(-1) for tensors in outgoing for t in tensors]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        receive_sizes = [sum(shard_slice.numel for shard_slice in slices) for slices in expected]
        receive = torch.empty(sum(receive_sizes), dtype=dtype, device=device)
        send_sizes = [sum(t.numel() for t in tensors) for tensors in outgoing]
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=self._group)
        return [
            list(torch.split(chunk, [shard_slice.numel for shard_slice in slices]))
            for slices, chunk in zip(expected, torch.split(receive, receive_sizes), strict=True)
        ]


def _local_gradient(p: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of the gradient, placed like the parameter."""
    grad: Any = p.grad
    if is_dtensor(grad) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return _local_shard(grad).to(p.dtype)


def _find_senders(slices: Sequence[ShardSlice]) -> list[int]:
    """Return the ranks whose shards make up the parameter; of several equal shards, the first rank sends its own."""
    first_rank: dict[ShardSlice, int] = {}
    for rank, shard_slice in enumerate(slices):
        if shard_slice.numel:
            first_rank.setdefault(shard_slice, rank)
    return sorted(first_rank.values())

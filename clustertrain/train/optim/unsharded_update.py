"""Updates that need whole parameters, for parameters that lie in shards.

Norms of a parameter, factored moments, matrices and 8-bit blocks are another thing on a shard than on the whole. So
each parameter has an owner among the ranks that share it: the owner gets its gradient and its value from all of them,
has its optimizer state alone, updates it, and sends everybody's part back. Two all-to-all exchanges a step, which
together move twice what the gradients' reduction does; the state is as evenly spread as whole parameters allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from clustertrain.checkpoint.core.state_dict import Kept, block, is_dtensor
from clustertrain.train.optim.wrapper import Groups, Make, Wrapped


class Piece(NamedTuple):
    """Where a rank's part lies in a parameter."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: the largest first, each to the rank that has least so far."""
    load = [0] * ranks
    found = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found[i] = min(range(ranks), key=lambda r: (load[r], r))
        load[found[i]] += sizes[i]
    return found


def _hollow(p: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape and type with one element's memory."""
    return torch.zeros((), dtype=p.dtype, device=_local(p).device).expand(p.shape)


def _local(value: Any) -> torch.Tensor:
    return block("", "optimizer", value).local


class Gathered(Wrapped):
    """An optimizer over whole parameters, each on its owner. All ranks of ``group`` step together, and must agree on
    which parameters have a gradient, as ``fully_shard`` itself needs."""

    def __init__(self, groups: Groups, make: Make, group: dist.ProcessGroup | None) -> None:
        """Collective.

        Args:
            make: called with the groups of this rank's whole parameters, some of them empty.
            group: the ranks that share the parameters; None: this one alone.
        """
        super().__init__(groups)
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._ranks = dist.get_world_size(self._group) if self._group is not None else 1
        self._rank = dist.get_rank(self._group) if self._group is not None else 0
        self._params: list[torch.Tensor] = [p for g in self.param_groups for p in g["params"]]
        self._owner = owners([p.numel() for p in self._params], self._ranks)
        self._pieces = self._all_pieces()
        self._senders = [_senders([pieces[i] for pieces in self._pieces]) for i in range(len(self._params))]
        mine = [i for i, owner in enumerate(self._owner) if owner == self._rank]
        self._whole = {i: torch.nn.Parameter(_hollow(self._params[i])) for i in mine}
        number = {id(p): i for i, p in enumerate(self._params)}
        inside = [
            {**g, "params": [self._whole[number[id(p)]] for p in g["params"] if number[id(p)] in self._whole]}
            for g in self.param_groups
        ]
        self._take(make(inside), range(len(self.param_groups)))

    def _all_pieces(self) -> list[list[Piece]]:
        """By rank and parameter."""
        mine = []
        for p in self._params:
            found = block("", "optimizer", p)
            mine.append(Piece(found.start, tuple(found.local.shape)))
        if self._group is None:
            return [mine]
        told: list[Any] = [None] * self._ranks
        dist.all_gather_object(told, mine, group=self._group)
        return told

    def keepers(self) -> list[Kept]:
        outer = {id(whole): self._params[i] for i, whole in self._whole.items()}
        return [Kept(kept.optimizer, {id(p): outer[id(kept.of(p))] for p in kept.params}) for kept in super().keepers()]

    def _update(self) -> None:
        moving: dict[torch.dtype, list[int]] = {}
        for i, p in enumerate(self._params):
            if p.grad is not None:
                moving.setdefault(p.dtype, []).append(i)
        for dtype, of in moving.items():
            values = self._gather(of, [_local(self._params[i]) for i in of], dtype)
            grads = self._gather(of, [_gradient(self._params[i]) for i in of], dtype)
            for i in values:
                self._whole[i].data, self._whole[i].grad = values[i], grads[i]
        super()._update()
        for dtype, of in moving.items():
            self._scatter(of, dtype)
            for i in of:
                if i in self._whole:
                    self._whole[i].data, self._whole[i].grad = _hollow(self._params[i]), None

    def _gather(self, of: list[int], mine: list[torch.Tensor], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """The whole tensors that this rank owns of those number ``of``, of which it has the parts ``mine``."""
        parts = dict(zip(of, mine, strict=True))
        sent = [[i for i in of if self._owner[i] == r and self._rank in self._senders[i]] for r in range(self._ranks)]
        received = [[i for i in of if i in self._whole and r in self._senders[i]] for r in range(self._ranks)]
        arrived = self._exchange(
            [[parts[i] for i in ids] for ids in sent],
            [[self._pieces[r][i] for i in ids] for r, ids in enumerate(received)],
            dtype,
        )
        found = {i: torch.empty(self._params[i].shape, dtype=dtype, device=parts[i].device)
                 for i in of if i in self._whole}  # fmt: skip
        for r, ids in enumerate(received):
            for i, flat in zip(ids, arrived[r], strict=True):
                piece = self._pieces[r][i]
                found[i][piece.place] = flat.view(piece.shape)
        return found

    def _scatter(self, of: list[int], dtype: torch.dtype) -> None:
        """Everybody's part of the whole parameters number ``of``."""
        mine = self._pieces[self._rank]
        owned = [i for i in of if i in self._whole]
        received = [[i for i in of if self._owner[i] == r] for r in range(self._ranks)]
        arrived = self._exchange(
            [[self._whole[i].detach()[pieces[i].place] for i in owned] for pieces in self._pieces],
            [[mine[i] for i in ids] for ids in received],
            dtype,
        )
        for ids, flats in zip(received, arrived, strict=True):
            for i, flat in zip(ids, flats, strict=True):
                _local(self._params[i]).copy_(flat.view(mine[i].shape))

    def _exchange(
        self, sent: list[list[torch.Tensor]], expected: list[list[Piece]], dtype: torch.dtype
    ) -> list[list[torch.Tensor]]:
        """Send the tensors ``sent[r]`` to rank r; returns those that each rank sends, flat."""
        if self._group is None:
            return [[t.reshape(-1) for t in sent[0]]]
        device = _local(self._params[0]).device
        flat = [t.reshape(-1) for to in sent for t in to]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        sizes = [sum(piece.numel for piece in pieces) for pieces in expected]
        receive = torch.empty(sum(sizes), dtype=dtype, device=device)
        dist.all_to_all_single(receive, send, sizes, [sum(t.numel() for t in to) for to in sent], group=self._group)
        return [
            list(torch.split(whole, [piece.numel for piece in pieces]))
            for pieces, whole in zip(expected, torch.split(receive, sizes), strict=True)
        ]


def _gradient(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of it, where its part of the parameter lies."""
    grad: Any = p.grad
    if is_dtensor(grad) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return _local(grad).to(p.dtype)


def _senders(pieces: Sequence[Piece]) -> list[int]:
    """The ranks whose pieces make the whole: of equal ones the first."""
    first: dict[Piece, int] = {}
    for rank, piece in enumerate(pieces):
        if piece.numel:
            first.setdefault(piece, rank)
    return sorted(first.values())

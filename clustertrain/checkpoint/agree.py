"""What the ranks tell each other while they save and restore: JSON over a private gloo group, no pickle.

A group of its own, because a collective of the training loop in flight on the same group would be matched with ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """All ranks of the job. ``group`` is None for a single process."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order, on rank 0; an empty list on the others."""
        if self._group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self._group)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        if self.rank != 0:
            dist.gather(padded, None, group=self._group, group_dst=0)
            return []
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.gather(padded, parts, group=self._group, group_dst=0)
        return [json.loads(p[: int(n)].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self._group is None:
            return value
        data = bytearray(json.dumps(value).encode()) if self.rank == 0 else bytearray()
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self._group, group_src=0)
        buffer = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, group=self._group, group_src=0)
        return json.loads(buffer.numpy().tobytes())

    def troubles(self, mine: dict[str, Any] | None) -> list[dict[str, Any]]:
        """What went wrong on any rank, with its number before ``why``; empty when all is well. The same list on every
        rank."""
        told = self.gather(mine)
        found: list[dict[str, Any]] = self.broadcast(numbered(told))
        return found


def numbered(told: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The troubles of all ranks, in rank order, each with its rank's number before ``why``."""
    return [{**t, "why": f"rank {r}: {t['why']}"} for r, t in enumerate(told) if t is not None]

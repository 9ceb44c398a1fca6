"""What the ranks tell each other while they save and restore: JSON over a private gloo group, no pickle.

A group of its own, because a collective of the training loop in flight on the same group would be matched with ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from clustertrain.checkpoint.core.failures import Trouble, error, told
from clustertrain.errors import CheckpointError

_HEAD_BYTES = 512
_LENGTH_BYTES = 8
_ROOM_BYTES = _HEAD_BYTES - _LENGTH_BYTES


class Ranks:
    """All ranks of the job. ``group`` is None for a single process."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    def records(self, mine: bytes) -> list[bytes]:
        """``mine`` of every rank, in rank order, on every rank; as many bytes on each of them. One exchange."""
        return self.exchange(mine)()

    def exchange(self, mine: bytes) -> Callable[[], list[bytes]]:
        """:meth:`records` that are on their way while something else is done; the returned call waits for them."""
        if self._group is None:
            return lambda: [mine]
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = torch.empty(self.world_size * len(mine), dtype=torch.uint8)
        work = dist.all_gather_into_tensor(found, sent, group=self._group, async_op=True)

        def wait() -> list[bytes]:
            assert work is not None and sent.numel() == len(mine)
            work.wait()
            data = found.numpy().tobytes()
            return [data[at : at + len(mine)] for at in range(0, len(data), len(mine))]

        return wait

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
        data = json.dumps(value).encode() if self.rank == 0 else b""
        # The length, and what has room beside it: most is said in one exchange.
        head = bytearray(len(data).to_bytes(_LENGTH_BYTES, "big") + data[:_ROOM_BYTES]).ljust(_HEAD_BYTES, b"\0")
        buffer = torch.frombuffer(head, dtype=torch.uint8)
        dist.broadcast(buffer, group=self._group, group_src=0)
        size = int.from_bytes(head[:_LENGTH_BYTES], "big")
        data = data if self.rank == 0 else bytes(head[_LENGTH_BYTES : _LENGTH_BYTES + size])
        if size > _ROOM_BYTES:
            rest = torch.frombuffer(bytearray(data[_ROOM_BYTES:]) or bytearray(size - _ROOM_BYTES), dtype=torch.uint8)
            dist.broadcast(rest, group=self._group, group_src=0)
            data = data[:_ROOM_BYTES] + rest.numpy().tobytes()
        return json.loads(data)

    def troubles(self, mine: Trouble | None) -> list[Trouble]:
        """What went wrong on any rank, in rank order, each with the rank's number before ``why``; empty when all is
        well. The same list on every rank."""
        everybody = self.told(None if mine is None else {"why": mine.why, "of": mine.of})
        return [Trouble(why=f"rank {r}: {t['why']}", of=t["of"]) for r, t in enumerate(everybody) if t is not None]

    def told(self, mine: Any) -> list[Any]:
        """``mine`` of every rank, in rank order, on every rank; an empty list where nobody has anything to tell."""
        if not any(map(any, self.records(bytes([mine is not None])))):
            return []
        everybody: list[Any] = self.broadcast(self.gather(mine))
        return everybody

    def on_first(self, act: Callable[[], Any], failure: str) -> Any:
        """Run ``act`` on rank 0 and tell all ranks what it returned, or that it failed."""
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome = {"value": act()}
            except (OSError, CheckpointError) as e:
                trouble = told(e)
                outcome = {"trouble": {"why": trouble.why, "of": trouble.of}}
        outcome = self.broadcast(outcome)
        if "trouble" in outcome:
            raise error(failure, [Trouble(**outcome["trouble"])])
        return outcome["value"]

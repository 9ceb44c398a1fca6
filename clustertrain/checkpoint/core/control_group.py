"""Collectives of saves and restores: JSON over a private gloo group, no pickle.

The group is private because a collective of the training loop in flight on the same group would be matched with these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.errors import CheckpointError

T = TypeVar("T")  # a JSON value

_HEAD_BYTES = 512
_LENGTH_BYTES = 8
_INLINE_BYTES = _HEAD_BYTES - _LENGTH_BYTES


class Ranks:
    """All ranks of the job. ``group`` is None for a single process."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the ``payload`` of every rank, in rank order. All payloads have the same length. One collective."""
        return self.all_gather_bytes_async(payload)()

    def all_gather_bytes_async(self, payload: bytes) -> Callable[[], list[bytes]]:
        """Start :meth:`all_gather_bytes`; the returned function waits for it and returns the payloads."""
        if self._group is None:
            return lambda: [payload]
        send_buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        recv_buffer = torch.empty(self.world_size * len(payload), dtype=torch.uint8)
        work = dist.all_gather_into_tensor(recv_buffer, send_buffer, group=self._group, async_op=True)

        def wait() -> list[bytes]:
            assert work is not None and send_buffer.numel() == len(payload)
            work.wait()
            data = recv_buffer.numpy().tobytes()
            return [data[at : at + len(payload)] for at in range(0, len(data), len(payload))]

        return wait

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, in rank order, on rank 0; an empty list on the others."""
        if self._group is None:
            return [value]
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([encoded.numel()]), group=self._group)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: encoded.numel()] = encoded
        if self.rank != 0:
            dist.gather(padded, None, group=self._group, group_dst=0)
            return []
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.gather(padded, gathered, group=self._group, group_dst=0)
        return [json.loads(p[: int(n)].numpy().tobytes()) for p, n in zip(gathered, sizes, strict=True)]

    def broadcast(self, value: T) -> T:
        """Return rank 0's ``value`` on every rank."""
        if self._group is None:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        # The head has the length and the first bytes, so that most values need one collective.
        head = bytearray(len(data).to_bytes(_LENGTH_BYTES, "big") + data[:_INLINE_BYTES]).ljust(_HEAD_BYTES, b"\0")
        buffer = torch.frombuffer(head, dtype=torch.uint8)
        dist.broadcast(buffer, group=self._group, group_src=0)
        size = int.from_bytes(head[:_LENGTH_BYTES], "big")
        data = data if self.rank == 0 else bytes(head[_LENGTH_BYTES : _LENGTH_BYTES + size])
        if size > _INLINE_BYTES:
            rest = torch.frombuffer(
                bytearray(data[_INLINE_BYTES:]) or bytearray(size - _INLINE_BYTES), dtype=torch.uint8
            )
            dist.broadcast(rest, group=self._group, group_src=0)
            data = data[:_INLINE_BYTES] + rest.numpy().tobytes()
        received: T = json.loads(data)
        return received

    def all_gather_failures(self, own_failure: Failure | None) -> list[Failure]:
        """Return the failures of all ranks, in rank order, each message prefixed with its rank.

        Every rank returns the same list.
        """
        own_fields: dict[str, Any] | None = (
            None if own_failure is None else {"message": own_failure.message, "kind": own_failure.kind}
        )
        gathered = self.all_gather_optional(own_fields)
        return [
            Failure(message=f"rank {rank}: {fields['message']}", kind=fields["kind"])
            for rank, fields in enumerate(gathered)
            if fields is not None
        ]

    def all_gather_optional(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, in rank order, on every rank; an empty list if all are None."""
        if not any(map(any, self.all_gather_bytes(bytes([value is not None])))):
            return []
        return self.broadcast(self.gather(value))

    def run_on_rank0(self, func: Callable[[], T], error_prefix: str) -> T:
        """Run ``func`` on rank 0 and return its result on every rank.

        Raises:
            CheckpointError: on every rank, after ``error_prefix``, if ``func`` raised an OSError or CheckpointError.
        """
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome = {"value": func()}
            except (OSError, CheckpointError) as e:
                caught = failure_from_exception(e)
                outcome = {"failure": {"message": caught.message, "kind": caught.kind}}
        outcome = self.broadcast(outcome)
        if "failure" in outcome:
            raise error_from_failures(error_prefix, [Failure(**outcome["failure"])])
        value: T = outcome["value"]
        return value

"""Messages between all ranks on the CPU, along a tree of small gloo groups.

A gloo group connects each pair of its ranks: a socket per rank and peer. Here the ranks form groups of eight, the first
ranks of eight groups form one more, and so on, so a rank of n has about 7 log8(n) sockets at most, and most ranks have
eight. Consecutive ranks share a node, so most messages stay on it. docs/decisions/0048-tree-of-control-groups.md says
why these are not lazily connected groups of all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

GROUP_SIZE = 8
Combine = Callable[[Sequence[bytes]], bytes]

_HEAD_BYTES = 512
_LENGTH_BYTES = 8
_INLINE_BYTES = _HEAD_BYTES - _LENGTH_BYTES


class ControlGroup:
    """All ranks of the job.

    Operations are collective: every rank starts the same ones in the same order. A thread runs them in that order, so
    that an operation proceeds while the caller does something else.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Connect the ranks. Collective.

        Args:
            store: used by this group alone.
            timeout: limits each wait for a peer.
        """
        self.rank, self.world_size = rank, world_size
        self._levels = _connect(store, rank, world_size, timeout)
        self._operations: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        # A daemon, because it may wait for a dead peer when the process ends.
        self._thread = threading.Thread(target=self._run_operations, name="control group", daemon=True)
        self._thread.start()

    def reduce(self, payload: bytes, combine: Combine, *, to_all: bool = True) -> Callable[[], bytes]:
        """Start to combine the payloads of all ranks; the returned function waits for the result.

        Args:
            combine: returns one payload for those of consecutive ranks, in rank order.
            to_all: whether all ranks get the result; otherwise only rank 0 does, and the others get what they sent.
        """
        return self._start(_Operation(payload, combine, to_all))

    def broadcast(self, payload: bytes) -> bytes:
        """Return rank 0's ``payload`` on every rank."""
        return self._start(_Operation(payload, None, True))()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.reduce(b"", b"".join)()

    def close(self) -> None:
        """Wait for the operations in flight and disconnect."""
        self._operations.put(None)
        self._thread.join()
        self._levels.clear()

    def _start(self, operation: _Operation) -> Callable[[], bytes]:
        self._operations.put(operation)
        return operation.result.result

    def _run_operations(self) -> None:
        while (operation := self._operations.get()) is not None:
            try:
                operation.result.set_result(self._run(operation))
            except BaseException as e:
                operation.result.set_exception(e)

    def _run(self, operation: _Operation) -> bytes:
        payload = operation.payload
        if operation.combine is not None:
            for level in self._levels:
                payload = level.gather_to_leader(payload, operation.combine)
        if operation.to_all:
            for level in reversed(self._levels):
                payload = level.broadcast_from_leader(payload)
        return payload


class _Operation:
    """An operation in the queue: up the tree with ``combine`` unless that is None, down the tree if ``to_all``."""

    def __init__(self, payload: bytes, combine: Combine | None, to_all: bool) -> None:
        self.payload, self.combine, self.to_all = payload, combine, to_all
        self.result: Future[bytes] = Future()


@dataclass(frozen=True)
class _Level:
    """A group of at most GROUP_SIZE ranks, of which the first one leads."""

    gloo: Any  # torch's stubs of ProcessGroupGloo lack its methods
    rank: int
    size: int

    def gather_to_leader(self, payload: bytes, combine: Combine) -> bytes:
        """Return the combined payloads on the leader, and ``payload`` on the others."""
        if self.rank != 0:
            self._send(payload, [0])
            return payload
        return combine([payload, *(self._receive(peer) for peer in range(1, self.size))])

    def broadcast_from_leader(self, payload: bytes) -> bytes:
        if self.rank != 0:
            return self._receive(0)
        self._send(payload, range(1, self.size))
        return payload

    # The head has the length and the first bytes, so that most messages are one transfer.

    def _send(self, payload: bytes, peers: Sequence[int]) -> None:
        head = (len(payload).to_bytes(_LENGTH_BYTES, "big") + payload[:_INLINE_BYTES]).ljust(_HEAD_BYTES, b"\0")
        parts = [head, payload[_INLINE_BYTES:]] if len(payload) > _INLINE_BYTES else [head]
        tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
        works = [self.gloo.send([tensor], peer, 0) for peer in peers for tensor in tensors]
        for work in works:
            work.wait()

    def _receive(self, peer: int) -> bytes:
        head = self._receive_bytes(peer, _HEAD_BYTES)
        size = int.from_bytes(head[:_LENGTH_BYTES], "big")
        payload = head[_LENGTH_BYTES : _LENGTH_BYTES + size]
        return payload + self._receive_bytes(peer, size - len(payload)) if size > len(payload) else payload

    def _receive_bytes(self, peer: int, size: int) -> bytes:
        tensor = torch.empty(size, dtype=torch.uint8)
        self.gloo.recv([tensor], peer, 0).wait()
        return tensor.numpy().tobytes()


def _connect(store: Store, rank: int, world_size: int, timeout: timedelta) -> list[_Level]:
    """Return the groups of ``rank``, from the leaves of the tree: it leads all of them but perhaps the last."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_default_device()]  # one listening socket for all groups
    levels: list[_Level] = []
    stride = 1
    while stride < world_size and rank % stride == 0:
        first = rank - rank % (stride * GROUP_SIZE)
        members = range(first, min(first + stride * GROUP_SIZE, world_size), stride)
        if len(members) > 1:
            prefix = PrefixStore(f"{stride}/{first}/", store)
            gloo = ProcessGroupGloo(prefix, members.index(rank), len(members), options)
            levels.append(_Level(gloo, members.index(rank), len(members)))
        stride *= GROUP_SIZE
    return levels

"""Messages between all ranks on the CPU, along a tree of small gloo groups.

A gloo group connects each pair of its ranks: a socket per rank and peer. Here the ranks form groups of eight, the first
ranks of eight groups form one more, and so on, so a rank of n has about 7 log8(n) sockets at most, and most ranks have
eight. Consecutive ranks share a node, so most messages stay on it. docs/decisions/0048-tree-of-control-groups.md says
why these are not lazily connected groups of all ranks.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

GROUP_SIZE = 8
Combine = Callable[[Sequence[bytes]], bytes]

_HEAD_BYTES = 512
_LENGTH_BYTES = 8
_INLINE_BYTES = _HEAD_BYTES - _LENGTH_BYTES


class ControlGroup:
    """All ranks of the job.

    Operations are collective: every rank starts the same ones in the same order. A thread runs them in that order, so
    that an operation proceeds while the caller does something else. After an operation has failed, the ranks may be at
    different ones, so this rank disconnects, which makes its peers fail too, and all later operations raise the same
    error.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Connect the ranks. Collective.

        Args:
            store: used by this group alone.
            timeout: limits each wait for a peer.
        """
        self.rank, self.world_size = rank, world_size
        self._waiter = _Waiter()
        self._levels = _connect(store, rank, world_size, timeout, self._waiter)
        self._operations: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._is_closed = False
        # A daemon, because it may wait for a peer when the process ends.
        self._thread = threading.Thread(target=self._run_operations, name="control group", daemon=True)
        self._thread.start()
        atexit.register(self._abort)

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
        self._is_closed = True
        self._operations.put(None)
        self._thread.join()
        atexit.unregister(self._abort)

    def _abort(self) -> None:
        """End the thread without waiting for peers.

        Python ends a daemon thread that returns to the interpreter during its shutdown (up to 3.13). If the thread
        returns from gloo, that terminates the process with SIGABRT.
        """
        self._is_closed = True
        self._operations.put(None)
        while self._thread.is_alive():
            self._waiter.abort()
            self._thread.join(0.01)

    def _start(self, operation: _Operation) -> Callable[[], bytes]:
        if self._is_closed:
            raise RuntimeError("the control group is closed")
        self._operations.put(operation)
        return operation.result.result

    def _run_operations(self) -> None:
        error: BaseException | None = None
        while (operation := self._operations.get()) is not None:
            if error is None:
                error = self._try(operation)
            if error is not None:
                operation.result.set_exception(error)
            del operation  # its payload may be large, and the next one may come late
        self._levels.clear()

    def _try(self, operation: _Operation) -> BaseException | None:
        try:
            operation.result.set_result(self._run(operation))
        except BaseException as e:
            self._levels.clear()
            return e.with_traceback(None)  # whose frames would keep the connections open
        return None

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


class _Waiter:
    """Waits for transfers, until another thread calls :meth:`abort`."""

    def __init__(self) -> None:
        self._is_aborted = False
        self._current: Work | None = None

    def wait(self, work: Work) -> None:
        """Wait for ``work``, at most for the timeout of its group.

        Raises:
            RuntimeError: gloo's, or after an abort.
        """
        self._current = work
        try:
            if self._is_aborted:
                raise RuntimeError("the control group is closed")
            work.wait()
        finally:
            self._current = None

    def abort(self) -> None:
        """Make the other thread's current wait fail, and all later ones. It may have to be repeated."""
        self._is_aborted = True
        # torch 2.13 has no function for it in Python. A wait that times out fails all others of its gloo group.
        if (work := self._current) is not None:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))


@dataclass(frozen=True)
class _Level:
    """A group of at most GROUP_SIZE ranks, of which the first one leads."""

    gloo: Any  # torch's stubs of ProcessGroupGloo lack its methods
    rank: int
    size: int
    waiter: _Waiter

    def gather_to_leader(self, payload: bytes, combine: Combine) -> bytes:
        """Return the combined payloads on the leader, and ``payload`` on the others."""
        if self.rank != 0:
            self._send(payload, [0])
            return payload
        heads = [self._start_receive(peer, _HEAD_BYTES) for peer in range(1, self.size)]
        return combine([payload, *(self._finish_receive(peer, head) for peer, head in enumerate(heads, 1))])

    def broadcast_from_leader(self, payload: bytes) -> bytes:
        if self.rank != 0:
            return self._finish_receive(0, self._start_receive(0, _HEAD_BYTES))
        self._send(payload, range(1, self.size))
        return payload

    # The head has the length and the first bytes, so that most messages are one transfer.

    def _send(self, payload: bytes, peers: Sequence[int]) -> None:
        head = (len(payload).to_bytes(_LENGTH_BYTES, "big") + payload[:_INLINE_BYTES]).ljust(_HEAD_BYTES, b"\0")
        parts = [head, payload[_INLINE_BYTES:]] if len(payload) > _INLINE_BYTES else [head]
        tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
        works = [self.gloo.send([tensor], peer, 0) for peer in peers for tensor in tensors]
        for work in works:
            self.waiter.wait(work)

    def _start_receive(self, peer: int, size: int) -> _Reception:
        buffer = torch.empty(size, dtype=torch.uint8)
        return _Reception(self.gloo.recv([buffer], peer, 0), buffer)

    def _finish_receive(self, peer: int, head: _Reception) -> bytes:
        """Return the message from ``peer``, after its ``head`` and with the rest."""
        self.waiter.wait(head.work)
        data = head.buffer.numpy().tobytes()
        size = int.from_bytes(data[:_LENGTH_BYTES], "big")
        payload = data[_LENGTH_BYTES : _LENGTH_BYTES + size]
        if size == len(payload):
            return payload
        rest = self._start_receive(peer, size - len(payload))
        self.waiter.wait(rest.work)
        return payload + rest.buffer.numpy().tobytes()


class _Reception(NamedTuple):
    work: Work
    buffer: torch.Tensor


def _connect(store: Store, rank: int, world_size: int, timeout: timedelta, waiter: _Waiter) -> list[_Level]:
    """Return the groups of ``rank``, from the leaves of the tree: it leads all of them but perhaps the last."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1  # of gloo's collectives, which are not used
    options._devices = [ProcessGroupGloo.create_default_device()]  # one listening socket for all groups
    levels: list[_Level] = []
    stride = 1
    while stride < world_size and rank % stride == 0:
        first = rank - rank % (stride * GROUP_SIZE)
        members = range(first, min(first + stride * GROUP_SIZE, world_size), stride)
        if len(members) > 1:
            prefix = PrefixStore(f"{stride}/{first}/", store)
            gloo = ProcessGroupGloo(prefix, members.index(rank), len(members), options)
            levels.append(_Level(gloo, members.index(rank), len(members), waiter))
        stride *= GROUP_SIZE
    return levels

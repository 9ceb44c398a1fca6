"""Collectives of saves and restores: JSON over a control group, no pickle.

The group is private to the checkpoints, because a collective of somebody else in flight on the same group would be
matched with these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from clustertrain.checkpoint.core.control_group import ControlGroup
from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.errors import CheckpointError

T = TypeVar("T")  # a JSON value

_LENGTH_BYTES = 8


class Ranks:
    """All ranks of the job. ``group`` is None for a single process."""

    def __init__(self, group: ControlGroup | None = None) -> None:
        self._group = group
        self.rank = group.rank if group is not None else 0
        self.world_size = group.world_size if group is not None else 1

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the ``payload`` of every rank, in rank order. All payloads have the same length. One collective."""
        return self.all_gather_bytes_async(payload)()

    def all_gather_bytes_async(self, payload: bytes) -> Callable[[], list[bytes]]:
        """Start :meth:`all_gather_bytes`; the returned function waits for it and returns the payloads."""
        if self._group is None:
            return lambda: [payload]
        wait = self._group.reduce(payload, b"".join)

        def collect() -> list[bytes]:
            data = wait()
            size = len(payload)
            return [data[rank * size : (rank + 1) * size] for rank in range(self.world_size)]

        return collect

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, in rank order, on rank 0; an empty list on the others."""
        if self._group is None:
            return [value]
        encoded = json.dumps(value).encode()
        data = self._group.reduce(len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded, b"".join, to_all=False)()
        return _split(data) if self.rank == 0 else []

    def broadcast(self, value: T) -> T:
        """Return rank 0's ``value`` on every rank."""
        if self._group is None:
            return value
        received: T = json.loads(self._group.broadcast(json.dumps(value).encode() if self.rank == 0 else b""))
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


def _split(data: bytes) -> list[Any]:
    """Return the JSON values in ``data``, each after its length."""
    values, at = [], 0
    while at < len(data):
        first = at + _LENGTH_BYTES
        at = first + int.from_bytes(data[at:first], "big")
        values.append(json.loads(data[first:at]))
    return values

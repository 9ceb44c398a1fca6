"""A writer of training scalars that does not make the training loop wait for the device."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clustertrain import fsio
from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core.async_copy import AsyncCopy
from clustertrain.train.session.row_line import RowLine

PlainValue = float | int | bool | str | None
Scalar = PlainValue | torch.Tensor | np.generic | np.ndarray[Any, Any]


def check_scalar(name: str, value: Scalar) -> PlainValue | torch.Tensor:
    """Return ``value`` as a tensor or plain Python value; NumPy scalars become Python scalars.

    Raises:
        UsageError: ``value`` is not a scalar.
    """
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return value
    scalar: Any = value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        scalar = value.item()
    if scalar is None or isinstance(scalar, (float, int, str)):
        return scalar
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
    raise UsageError(
        f"session.log({name}=…): a value of type {type(value).__name__}{shape} cannot be logged",
        fix="give a number, a string, None, or a tensor of one element",
    )


@dataclass
class _Row:
    host_values: dict[str, Any]
    pending_copies: list[AsyncCopy]
    is_repeat: bool

    def is_ready(self) -> bool:
        return all(copy.is_ready() for copy in self.pending_copies)

    def wait_for_values(self) -> dict[str, Any]:
        """Wait for the values still on the device and return all values."""
        values = dict(self.host_values)
        for copy in self.pending_copies:
            values.update(copy.to_dict(values))
        return values


class MetricsWriter:
    """Writer of the rows in ``metrics/attempt-<n>.jsonl``.

    A row is written once its values have reached the host, usually one step later. Every ``echo_every``-th row is also
    printed: to standard output, or without a ``path`` (outside a run) to standard error, the first row included. With
    neither, as on ranks other than 0, rows are dropped.
    """

    def __init__(
        self,
        path: Path | None,
        echo_every: int = 0,
        finalize_row: Callable[[dict[str, Any]], None] = lambda row: None,
        on_row: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        """``finalize_row`` may change each row before it is written; ``on_row`` is called with the written row."""
        self._file = fsio.JsonlAppender(path) if path else None
        self._finalize_row = finalize_row
        self._on_row = on_row
        self._echo_every = echo_every
        self._printed_first = path is not None
        self.line = RowLine()
        self._queue: deque[_Row] = deque()
        self.latest: dict[str, Any] = {}  # the last value written, by name

    @property
    def is_active(self) -> bool:
        """Whether rows are written or printed."""
        return self._file is not None or bool(self._echo_every)

    def enqueue(
        self,
        host_values: dict[str, Any],
        scalars: Mapping[str, PlainValue | torch.Tensor],
        pending_copies: Sequence[AsyncCopy] = (),
        *,
        is_repeat: bool = False,
    ) -> None:
        """Queue one row and write the earlier rows whose values have arrived.

        Args:
            host_values: values that replace those of the same name in ``scalars`` and ``pending_copies``.
            scalars: values that replace those of the same name in ``pending_copies``.
            is_repeat: the step already has a row; ``on_row`` is not called again.

        Raises:
            ConfigError: a tensor does not have exactly one element.
        """
        scalars = {k: v for k, v in scalars.items() if k not in host_values}
        tensors = {k: v.detach() for k, v in scalars.items() if isinstance(v, torch.Tensor)}
        for name, t in tensors.items():
            if t.numel() != 1:
                raise ConfigError(f"session.log({name}=…): a tensor of shape {tuple(t.shape)}; one element is required")
        if not self.is_active:
            return
        self.flush()
        numbers = {k: v for k, v in scalars.items() if not isinstance(v, torch.Tensor)}
        copies = [AsyncCopy([k], [t]) for k, t in tensors.items()]
        self._queue.append(_Row({**host_values, **numbers}, [*copies, *pending_copies], is_repeat))

    def flush(self, *, wait: bool = False) -> None:
        """Write the rows whose values have arrived; with ``wait``, wait for all of them."""
        while self._queue and (wait or self._queue[0].is_ready()):
            row = self._queue.popleft()
            values = row.wait_for_values()
            self._finalize_row(values)
            if self._file is not None:
                self._file.append(values)
            self.latest.update(values)
            self._print_row(values)
            if not row.is_repeat:
                self._on_row(values)

    def _print_row(self, row: Mapping[str, Any]) -> None:
        due = bool(self._echo_every) and row["step"] % self._echo_every == 0
        if due or (self._echo_every and not self._printed_first):
            stream = sys.stdout if self._file is not None else sys.stderr
            print(self.line.format(row), file=stream, flush=True)
            self._printed_first = True

    def switch_file(self, path: Path | None) -> None:
        """Write the rows from now on to ``path``, since their step numbers continue from an earlier step."""
        self.flush(wait=True)
        self.latest = {}  # values of discarded steps
        if self._file is not None and path is not None:
            self._file.close()
            self._file = fsio.JsonlAppender(path)

    def close(self, *, wait: bool = True) -> None:
        """Write the queued rows and close the file; without ``wait``, drop rows whose values have not arrived."""
        self.flush(wait=wait)
        self._queue.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._echo_every = 0

"""Training scalars on their way from the device to a file, without making the training loop wait."""

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
from clustertrain.train.core.async_copy import Arriving

PART = "/"  # in the name of a figure of one part: a layer, a slice
SUM = "sum_"  # begins the name of a running total
Plain = float | int | bool | str | None
Scalar = Plain | torch.Tensor | np.generic | np.ndarray[Any, Any]


def checked(name: str, value: Scalar) -> Plain | torch.Tensor:
    """``value`` as it can be written; numpy's scalars become Python's.

    Raises:
        UsageError: it is no scalar.
    """
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return value
    plain: Any = value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        plain = value.item()
    if plain is None or isinstance(plain, (float, int, str)):
        return plain
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
    raise UsageError(
        f"session.log({name}=…): a value of type {type(value).__name__}{shape} cannot be logged",
        fix="give a number, a string, None, or a tensor of one element",
    )


def _echoed(value: Plain) -> str:
    return f"{value:.6g}" if isinstance(value, (float, int)) and not isinstance(value, bool) else str(value)


@dataclass
class _Row:
    plain: dict[str, Any]
    coming: list[Arriving]
    again: bool

    def ready(self) -> bool:
        return all(part.ready() for part in self.coming)

    def values(self) -> dict[str, Any]:
        """Waits until all are there."""
        values = dict(self.plain)
        for part in self.coming:
            values.update(part.plain(values))
        return values


class Metrics:
    """Rows in ``metrics/attempt-<n>.jsonl``. A row is written when its values have arrived on the host: as a rule one
    step late. One row in ``echo_every`` is also printed: to standard output, or without a ``path`` (outside a run) to
    standard error, where the first row is printed as well. Rows with neither are dropped, as on ranks other than 0."""

    def __init__(
        self,
        path: Path | None,
        echo_every: int = 0,
        complete: Callable[[dict[str, Any]], None] = lambda row: None,
        on_row: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        """``complete`` may change each row before it is written, ``on_row`` is called with it afterwards."""
        self._file = fsio.Appender(path) if path else None
        self._complete = complete
        self._on_row = on_row
        self._echo_every = echo_every
        self._echoed_first = path is not None
        self._waiting: deque[_Row] = deque()
        self.newest: dict[str, Any] = {}  # by name the value that was written last

    @property
    def active(self) -> bool:
        """Whether rows are written or printed at all."""
        return self._file is not None or bool(self._echo_every)

    def put(
        self,
        plain: dict[str, Any],
        scalars: Mapping[str, Plain | torch.Tensor],
        coming: Sequence[Arriving] = (),
        *,
        again: bool = False,
    ) -> None:
        """Queue one row and write those before it that have arrived. What is in ``plain`` wins over ``scalars``, and
        both over what is ``coming`` already. ``again``: the row of this step was told before, so that ``on_row`` has
        seen it.

        Raises:
            ConfigError: a tensor of more than one element.
        """
        scalars = {k: v for k, v in scalars.items() if k not in plain}
        tensors = {k: v.detach() for k, v in scalars.items() if isinstance(v, torch.Tensor)}
        for name, t in tensors.items():
            if t.numel() != 1:
                raise ConfigError(f"session.log({name}=…): a tensor of shape {tuple(t.shape)}, one element is needed")
        if not self.active:
            return
        self.drain()
        numbers = {k: v for k, v in scalars.items() if not isinstance(v, torch.Tensor)}
        parts = [Arriving([k], [t]) for k, t in tensors.items()]
        self._waiting.append(_Row({**plain, **numbers}, [*parts, *coming], again))

    def drain(self, *, wait: bool = False) -> None:
        """Write the rows that have arrived; with ``wait`` all of them."""
        while self._waiting and (wait or self._waiting[0].ready()):
            row = self._waiting.popleft()
            values = row.values()
            self._complete(values)
            if self._file is not None:
                self._file.append(values)
            self.newest.update(values)
            self._echo(values)
            if not row.again:
                self._on_row(values)

    def _echo(self, row: Mapping[str, Any]) -> None:
        due = bool(self._echo_every) and row["step"] % self._echo_every == 0
        if due or (self._echo_every and not self._echoed_first):
            shown = ((k, v) for k, v in row.items() if k != "t" and PART not in k and not k.startswith(SUM))
            stream = sys.stdout if self._file is not None else sys.stderr
            print("  ".join(f"{k} {_echoed(v)}" for k, v in shown), file=stream, flush=True)
            self._echoed_first = True

    def go_on_in(self, path: Path | None) -> None:
        """The rows to come are of earlier steps than those so far: write them into ``path``."""
        self.drain(wait=True)
        self.newest = {}  # of steps that are thrown away
        if self._file is not None and path is not None:
            self._file.close()
            self._file = fsio.Appender(path)

    def close(self, *, wait: bool = True) -> None:
        """Write what is left; without ``wait`` only what has arrived."""
        self.drain(wait=wait)
        self._waiting.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._echo_every = 0

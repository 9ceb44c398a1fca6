"""Training scalars on their way from the device to a file, without making the training loop wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clustertrain import fsio
from clustertrain.errors import ConfigError, UsageError

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
    tensors: dict[str, torch.Tensor]  # on the CPU, filled once ``copied`` has passed
    copied: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class Metrics:
    """Rows in ``metrics/attempt-<n>.jsonl``. A row is written when its values have arrived on the host: as a rule one
    step late. Every ``echo_every`` steps one is printed too. Only rank 0 has a ``path``; elsewhere rows are dropped."""

    def __init__(self, path: Path | None, echo_every: int = 0) -> None:
        self._file = fsio.Appender(path) if path else None
        self._echo_every = echo_every
        self._waiting: deque[_Row] = deque()
        self.newest: dict[str, Any] = {}  # by name the value that was written last

    def put(self, plain: dict[str, Any], scalars: Mapping[str, Plain | torch.Tensor]) -> None:
        """Queue one row and write those before it that have arrived. What is in ``plain`` wins over ``scalars``.

        Raises:
            ConfigError: a tensor of more than one element.
        """
        scalars = {k: v for k, v in scalars.items() if k not in plain}
        tensors = {k: v.detach() for k, v in scalars.items() if isinstance(v, torch.Tensor)}
        for name, t in tensors.items():
            if t.numel() != 1:
                raise ConfigError(f"session.log({name}=…): a tensor of shape {tuple(t.shape)}, one element is needed")
        if self._file is None:
            return
        self.drain()
        numbers = {k: v for k, v in scalars.items() if not isinstance(v, torch.Tensor)}
        on_device = [t for t in tensors.values() if t.is_cuda]
        # Cloned on the CPU: the script may overwrite the tensor before it is written.
        copies = {k: t.to("cpu", non_blocking=True) if t.is_cuda else t.clone() for k, t in tensors.items()}
        event = None
        if on_device:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(on_device[0].device))
        self._waiting.append(_Row({**plain, **numbers}, copies, event))

    def drain(self, *, wait: bool = False) -> None:
        """Write the rows that have arrived; with ``wait`` all of them."""
        while self._file is not None and self._waiting and (wait or self._waiting[0].ready()):
            row = self._waiting.popleft()
            if row.copied is not None:
                row.copied.synchronize()
            values = {**row.plain, **{k: t.item() for k, t in row.tensors.items()}}
            self._file.append(values)
            self.newest.update(values)
            if self._echo_every and values["step"] % self._echo_every == 0:
                print("  ".join(f"{k} {_echoed(v)}" for k, v in values.items() if k != "t"), flush=True)

    def close(self, *, wait: bool = True) -> None:
        """Write what is left; without ``wait`` only what has arrived."""
        if self._file is not None:
            self.drain(wait=wait)
            self._file.close()
            self._file = None

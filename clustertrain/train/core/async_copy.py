"""Figures on their way from the device to the host, which does not wait for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class Arriving:
    """A vector of ``names``, copied when this is made and read when it is there."""

    def __init__(self, names: Sequence[str], values: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """``values``: one element each, all on one device, or a vector."""
        self.names = tuple(names)
        # One copy for all. In fp64, which holds all fp32 and what of integers a figure has.
        if isinstance(values, torch.Tensor):
            self._kinds, packed = [values.dtype] * len(values), values.detach().clone()
        else:
            self._kinds = [v.dtype for v in values]
            packed = values[0].detach().clone().reshape(1) if len(values) == 1 else _packed(values)
        self._copied: torch.cuda.Event | None = None
        # In pinned memory, as torch does by itself for a copy that does not wait.
        self._values = packed.to("cpu", non_blocking=True)
        if packed.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(packed.device))

    def ready(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def plain(self, without: Collection[str] = ()) -> dict[str, float | int | bool]:
        """By name; waits until they are there. Integers are such, and a flag is a bool."""
        if self._copied is not None:
            self._copied.synchronize()
        found = zip(self.names, self._values.tolist(), self._kinds, strict=True)
        return {name: _as(value, kind) for name, value, kind in found if name not in without}


def _packed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([v.detach().reshape(()).double() for v in values])


def _as(value: float, kind: torch.dtype) -> float | int | bool:
    if kind == torch.bool:
        return bool(value)
    return value if kind.is_floating_point else int(value)

"""Figures on their way from the device to the host, which does not wait for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class AsyncCopy:
    """A vector of ``names``, copied when this is made and read when it is there."""

    def __init__(self, names: Sequence[str], values: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """``values``: one element each, all on one device, or a vector."""
        self.names = tuple(names)
        # One copy for all. In fp64, which holds all fp32 and what of integers a figure has.
        if isinstance(values, torch.Tensor):
            self._dtypes, packed = [values.dtype] * len(values), values.detach().clone()
        else:
            self._dtypes = [v.dtype for v in values]
            packed = values[0].detach().clone().reshape(1) if len(values) == 1 else _stack_as_fp64(values)
        self._copy_done: torch.cuda.Event | None = None
        # In pinned memory, as torch does by itself for a copy that does not wait.
        self._host_values = packed.to("cpu", non_blocking=True)
        if packed.is_cuda:
            self._copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copy_done.record(torch.cuda.current_stream(packed.device))

    def is_ready(self) -> bool:
        return self._copy_done is None or bool(self._copy_done.query())  # type: ignore[no-untyped-call]

    def to_dict(self, exclude: Collection[str] = ()) -> dict[str, float | int | bool]:
        """By name; waits until they are there. Integers are such, and a flag is a bool."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        columns = zip(self.names, self._host_values.tolist(), self._dtypes, strict=True)
        return {name: _to_python_scalar(value, dtype) for name, value, dtype in columns if name not in exclude}


def _stack_as_fp64(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([v.detach().reshape(()).double() for v in values])


def _to_python_scalar(value: float, dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return bool(value)
    return value if dtype.is_floating_point else int(value)

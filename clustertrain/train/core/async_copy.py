"""Asynchronous copies of scalars from the device to the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class AsyncCopy:
    """Named scalars on their way to the host: the constructor starts the copy, :meth:`to_dict` reads the values."""

    def __init__(self, names: Sequence[str], values: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Start the copy. ``values`` are one-element tensors on the same device, or one vector."""
        self.names = tuple(names)
        # One copy for all values, in fp64: exact for fp32, and for integers up to 2**53.
        if isinstance(values, torch.Tensor):
            self._dtypes, packed = [values.dtype] * len(values), values.detach().clone()
        else:
            self._dtypes = [v.dtype for v in values]
            packed = values[0].detach().clone().reshape(1) if len(values) == 1 else _stack_as_fp64(values)
        self._copy_done: torch.cuda.Event | None = None
        # A non-blocking copy allocates pinned memory itself.
        self._host_values = packed.to("cpu", non_blocking=True)
        if packed.is_cuda:
            self._copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copy_done.record(torch.cuda.current_stream(packed.device))

    def is_ready(self) -> bool:
        """Return whether the values have arrived, without waiting."""
        return self._copy_done is None or bool(self._copy_done.query())  # type: ignore[no-untyped-call]

    def to_dict(self, exclude: Collection[str] = ()) -> dict[str, float | int | bool]:
        """Wait for the values and return them by name, without ``exclude``, as int, bool or float like their dtype."""
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

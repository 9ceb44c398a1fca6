"""A mode that computes in float64 even where code requests float32, so that gradients can be checked to ten digits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROWER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Float64Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        args = tuple(torch.float64 if a in _NARROWER_DTYPES else a for a in args) if _has_narrower_dtype(args) else args
        if kwargs.get("dtype") in _NARROWER_DTYPES:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _has_narrower_dtype(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.dtype) and a in _NARROWER_DTYPES for a in args)


@contextmanager
def force_float64() -> Iterator[None]:
    """Make float64 the default dtype, and the result of each request for a narrower one, inside the ``with`` block."""
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Mode():
            yield
    finally:
        torch.set_default_dtype(previous_dtype)

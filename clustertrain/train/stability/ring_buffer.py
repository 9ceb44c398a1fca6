"""The last values of a figure, on the device: pushed and asked without the host hearing of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class RingBuffer:
    """The last ``size`` values pushed. A value that is nan takes a place and is not counted."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._values = torch.full((size,), math.nan, device=device)
        self._next_index = 0

    def push(self, value: torch.Tensor) -> None:
        """``value``: one element; only this is known to the host, that there is one more."""
        self._values[self._next_index].copy_(value)
        self._next_index = (self._next_index + 1) % len(self._values)

    def count(self) -> torch.Tensor:
        """How many values there are, without nans."""
        return self._values.isnan().logical_not().sum()

    def mean(self) -> torch.Tensor:
        return self._values.nanmean()

    def median(self) -> torch.Tensor:
        """The lower one of an even number; nan of none."""
        return self.quantile(0.5)

    def median_abs_deviation(self) -> torch.Tensor:
        """The median of the distances from the median."""
        return _quantile((self._values - self.median()).abs(), 0.5)

    def quantile(self, fraction: float) -> torch.Tensor:
        """A value that was pushed, not one between two: the same bits on every kind of device."""
        return _quantile(self._values, fraction)

    def to_list(self) -> list[float]:
        """The oldest first. Waits for the device."""
        values = self._values.tolist()
        return [*values[self._next_index :], *values[: self._next_index]]

    def fill(self, values: Sequence[float]) -> None:
        """What :meth:`to_list` gave, also of a ring of another size."""
        size = len(self._values)
        recent = list(values)[-size:]
        padded = [math.nan] * (size - len(recent)) + recent
        self._values.copy_(torch.tensor(padded, dtype=self._values.dtype))
        self._next_index = 0


def _quantile(values: torch.Tensor, fraction: float) -> torch.Tensor:
    """Not by nanmedian, which on a GPU asks the device how many nans there are (torch 2.13)."""
    return values.nanquantile(fraction, interpolation="lower")

"""The last values of a figure, on the device: pushed and asked without the host hearing of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Ring:
    """The last ``size`` values pushed. A value that is nan takes a place and is not counted."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._values = torch.full((size,), math.nan, device=device)
        self._next = 0

    def push(self, value: torch.Tensor) -> None:
        """``value``: one element; only this is known to the host, that there is one more."""
        self._values[self._next].copy_(value)
        self._next = (self._next + 1) % len(self._values)

    def count(self) -> torch.Tensor:
        """How many values there are, without nans."""
        return self._values.isnan().logical_not().sum()

    def mean(self) -> torch.Tensor:
        return self._values.nanmean()

    def median(self) -> torch.Tensor:
        """The lower one of an even number; nan of none."""
        return self.quantile(0.5)

    def deviation(self) -> torch.Tensor:
        """The median of the distances from the median."""
        return _quantile((self._values - self.median()).abs(), 0.5)

    def quantile(self, share: float) -> torch.Tensor:
        """A value that was pushed, not one between two: the same bits on every kind of device."""
        return _quantile(self._values, share)

    def to_list(self) -> list[float]:
        """The oldest first. Waits for the device."""
        values = self._values.tolist()
        return [*values[self._next :], *values[: self._next]]

    def fill(self, values: Sequence[float]) -> None:
        """What :meth:`to_list` gave, also of a ring of another size."""
        size = len(self._values)
        kept = list(values)[-size:]
        padded = [math.nan] * (size - len(kept)) + kept
        self._values.copy_(torch.tensor(padded, dtype=self._values.dtype))
        self._next = 0


def _quantile(values: torch.Tensor, share: float) -> torch.Tensor:
    """Not by nanmedian, which on a GPU asks the device how many nans there are (torch 2.13)."""
    return values.nanquantile(share, interpolation="lower")

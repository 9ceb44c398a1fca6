"""A ring buffer of recent values on the device, written and queried without a host sync."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class RingBuffer:
    """The last ``size`` values. A NaN occupies a slot but does not count."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._values = torch.full((size,), math.nan, device=device)
        self._next_index = 0

    def push(self, value: torch.Tensor) -> None:
        """Add ``value``, a tensor of one element."""
        self._values[self._next_index].copy_(value)
        self._next_index = (self._next_index + 1) % len(self._values)

    def count(self) -> torch.Tensor:
        """Return the number of values, excluding NaN."""
        return self._values.isnan().logical_not().sum()

    def mean(self) -> torch.Tensor:
        """Return the mean, excluding NaN."""
        return self._values.nanmean()

    def median(self) -> torch.Tensor:
        """Return the median, for an even count the lower of the two middle values; NaN without values."""
        return self.quantile(0.5)

    def median_abs_deviation(self) -> torch.Tensor:
        """Return the median distance from the median."""
        return _quantile((self._values - self.median()).abs(), 0.5)

    def quantile(self, fraction: float) -> torch.Tensor:
        """Return a quantile without interpolation, so that its bits are the same on every device."""
        return _quantile(self._values, fraction)

    def to_list(self) -> list[float]:
        """Return the values, oldest first. Waits for the device."""
        values = self._values.tolist()
        return [*values[self._next_index :], *values[: self._next_index]]

    def fill(self, values: Sequence[float]) -> None:
        """Restore values that :meth:`to_list` returned, even for a buffer of a different size."""
        size = len(self._values)
        recent = list(values)[-size:]
        padded = [math.nan] * (size - len(recent)) + recent
        self._values.copy_(torch.tensor(padded, dtype=self._values.dtype))
        self._next_index = 0


def _quantile(values: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the lower quantile. nanmedian would wait for the GPU to count the NaNs (torch 2.13)."""
    return values.nanquantile(fraction, interpolation="lower")

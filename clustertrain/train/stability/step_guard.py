"""Whether a step may move the weights: decided on the device, from figures that all ranks have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clustertrain.config.stability import StabilitySpec
from clustertrain.train.stability import clipping
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.stability.ring_buffer import Ring

MAD_TO_DEVIATION = 1.4826  # of a normal distribution: 1 / its third quartile
LEAST_LOSSES = 16  # before there are so many, no loss is far from them
LEAST_SPREAD = 1e-3  # of the median: a loss that stands still must not make a spike of every tremor
SHARE_WINDOW = 100  # steps whose share of clipped ones is told


@dataclass(frozen=True)
class Judged:
    """Tensors of one element on the device. ``finite``: loss and gradient are; ``spike``: the loss is far above the
    last ones; ``skip``: the optimizer must not move for one of these; ``limit``: of the gradient's norm."""

    loss: torch.Tensor
    norm: torch.Tensor
    finite: torch.Tensor
    spike: torch.Tensor
    skip: torch.Tensor
    limit: torch.Tensor


class Guard:
    """All ranks hold the same: what comes in is the sum over all of them, with the same bits everywhere."""

    def __init__(self, spec: StabilitySpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._losses = Ring(spec.spike_window, device)
        self._norms = Ring(clipping.ADAPTIVE_WINDOW, device)
        self._clipped = Ring(SHARE_WINDOW, device)

    def judge(self, total: torch.Tensor, count: torch.Tensor, norm: torch.Tensor, clip: Clipping) -> Judged:
        """``total`` is the sum of the losses, ``count`` how many they are, ``norm`` that of the mean's gradient."""
        loss = (total / count).float()
        # Not of the mean: of a step that counts nothing it is no number, and nothing is wrong.
        finite = total.isfinite() & norm.isfinite()
        spike = torch.zeros_like(finite)
        limit = clipping.limit(clip, self._norms, self._device)
        if self.spec.spike != "off":
            spike = self._is_spike(loss)
            self._losses.push(_finite(loss))
        if clip.mode == "adaptive":
            self._norms.push(_finite(norm))
        skip = ~finite | spike if self.spec.spike == "skip" else ~finite
        return Judged(loss, norm, finite, spike, skip, limit)

    def _is_spike(self, loss: torch.Tensor) -> torch.Tensor:
        """By the median and the median deviation, which a spike among the last losses does not move."""
        median = self._losses.median()
        spread = torch.maximum(MAD_TO_DEVIATION * self._losses.deviation(), LEAST_SPREAD * median.abs())
        enough = self._losses.count() >= LEAST_LOSSES
        return enough & (loss > median + self.spec.spike_deviations * spread)

    def note_clipped(self, clipped: torch.Tensor) -> torch.Tensor:
        """Returns the share of clipped ones among the last steps, this one included."""
        self._clipped.push(clipped)
        return self._clipped.mean()

    def begin_anew(self) -> None:
        for ring in (self._losses, self._norms, self._clipped):
            ring.fill(())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._losses.to_list(), "norms": self._norms.to_list(), "clipped": self._clipped.to_list()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses.fill(state["losses"])
        self._norms.fill(state["norms"])
        self._clipped.fill(state["clipped"])


def _finite(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value.isfinite(), value, math.nan)

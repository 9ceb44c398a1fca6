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
from clustertrain.train.stability.ring_buffer import RingBuffer

MAD_TO_SIGMA = 1.4826  # of a normal distribution: 1 / its third quartile
MIN_LOSSES = 16  # before there are so many, no loss is far from them
MIN_RELATIVE_SPREAD = 1e-3  # of the median: a loss that stands still must not make a spike of every tremor
CLIP_FRACTION_WINDOW = 100  # steps whose share of clipped ones is told


@dataclass(frozen=True)
class StepVerdict:
    """Tensors of one element on the device. ``finite``: loss and gradient are; ``spike``: the loss is far above the
    last ones; ``skip``: the optimizer must not move for one of these; ``norm_limit``: of the gradient's norm."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    finite: torch.Tensor
    spike: torch.Tensor
    skip: torch.Tensor
    norm_limit: torch.Tensor


class StepGuard:
    """All ranks hold the same: what comes in is the sum over all of them, with the same bits everywhere."""

    def __init__(self, spec: StabilitySpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._losses = RingBuffer(spec.spike_window, device)
        self._norms = RingBuffer(clipping.ADAPTIVE_WINDOW, device)
        self._clipped = RingBuffer(CLIP_FRACTION_WINDOW, device)

    def check(self, total: torch.Tensor, count: torch.Tensor, norm: torch.Tensor, clip: Clipping) -> StepVerdict:
        """``total`` is the sum of the losses, ``count`` how many they are, ``grad_norm`` that of the mean's
        gradient."""
        loss = (total / count).float()
        # Not of the mean: of a step that counts nothing it is no number, and nothing is wrong.
        finite = total.isfinite() & norm.isfinite()
        spike = torch.zeros_like(finite)
        norm_limit = clipping.compute_norm_limit(clip, self._norms, self._device)
        if self.spec.spike != "off":
            spike = self._is_spike(loss)
            self._losses.push(_nan_unless_finite(loss))
        if clip.mode == "adaptive":
            self._norms.push(_nan_unless_finite(norm))
        skip = ~finite | spike if self.spec.spike == "skip" else ~finite
        return StepVerdict(loss, norm, finite, spike, skip, norm_limit)

    def _is_spike(self, loss: torch.Tensor) -> torch.Tensor:
        """By the median and the median deviation, which a spike among the last losses does not move."""
        median = self._losses.median()
        spread = torch.maximum(MAD_TO_SIGMA * self._losses.median_abs_deviation(), MIN_RELATIVE_SPREAD * median.abs())
        has_history = self._losses.count() >= MIN_LOSSES
        return has_history & (loss > median + self.spec.spike_deviations * spread)

    def record_clipped(self, clipped: torch.Tensor) -> torch.Tensor:
        """Returns the share of clipped ones among the last steps, this one included."""
        self._clipped.push(clipped)
        return self._clipped.mean()

    def init_fresh_state(self) -> None:
        for ring in (self._losses, self._norms, self._clipped):
            ring.fill(())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._losses.to_list(), "norms": self._norms.to_list(), "clipped": self._clipped.to_list()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses.fill(state["losses"])
        self._norms.fill(state["norms"])
        self._clipped.fill(state["clipped"])


def _nan_unless_finite(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value.isfinite(), value, math.nan)

"""Device-side decision whether a step may change the weights, based on values common to all ranks."""

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

MAD_TO_SIGMA = 1.4826  # 1 / the third quartile of the standard normal distribution
MIN_LOSSES = 16  # with fewer losses there are no spikes
MIN_RELATIVE_SPREAD = 1e-3  # of the median: tiny changes of a constant loss must not count as spikes
CLIP_FRACTION_WINDOW = 100  # steps over which the clipped fraction is reported


@dataclass(frozen=True)
class StepVerdict:
    """Result of a check: tensors of one element, on the device."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    finite: torch.Tensor
    """Whether loss and gradient norm are finite."""
    spike: torch.Tensor
    """Whether the loss is far above recent ones."""
    skip: torch.Tensor
    """Whether the optimizer must skip the step."""
    norm_limit: torch.Tensor
    """Limit of the gradient norm for clipping."""


class StepGuard:
    """State of the checks, identical on all ranks because the inputs are sums over all ranks with the same bits."""

    def __init__(self, spec: StabilitySpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._losses = RingBuffer(spec.spike_window, device)
        self._norms = RingBuffer(clipping.ADAPTIVE_WINDOW, device)
        self._clipped = RingBuffer(CLIP_FRACTION_WINDOW, device)

    def check(self, total: torch.Tensor, count: torch.Tensor, norm: torch.Tensor, clip: Clipping) -> StepVerdict:
        """Return whether a step is bad, and its norm limit.

        Args:
            total: sum of the losses over the global batch.
            count: number of losses.
            norm: norm of the gradient of the mean loss.
            clip: determines the norm limit.
        """
        loss = (total / count).float()
        # Check the sum rather than the mean, which is NaN, without being an error, if all targets are masked.
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
        """Return whether the loss is a spike, by median and median deviation, which a recent spike barely shifts."""
        median = self._losses.median()
        spread = torch.maximum(MAD_TO_SIGMA * self._losses.median_abs_deviation(), MIN_RELATIVE_SPREAD * median.abs())
        has_history = self._losses.count() >= MIN_LOSSES
        return has_history & (loss > median + self.spec.spike_deviations * spread)

    def record_clipped(self, clipped: torch.Tensor) -> torch.Tensor:
        """Record whether the step was clipped; return the clipped fraction of recent steps."""
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

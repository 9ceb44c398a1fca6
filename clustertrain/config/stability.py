"""The ``[stability]`` table: checks of each step and the reaction to divergence."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

DivergenceAction = Literal["stop", "roll-back"]


class StabilitySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[stability]`` table. A step with a NaN or Inf loss or gradient is skipped on all ranks."""

    max_skipped: int = 10
    """Most consecutive steps that may be skipped before ``on_divergence`` applies."""
    on_divergence: DivergenceAction = "stop"
    """Action after too many skipped steps. ``"stop"``: end the run. ``"roll-back"``: return to a checkpoint and omit
    the data since then."""
    spike: Literal["off", "warn", "skip", "roll-back"] = "warn"
    """Action after a loss far above the recent ones. ``"roll-back"``: as for ``on_divergence``."""
    spike_deviations: float = 8.0
    """Robust standard deviations above the median of recent losses that make a spike. Unused with ``spike = "off"``."""
    spike_window: int = 128
    """Steps whose losses count as recent, at least 16. Unused with ``spike = "off"``."""
    max_roll_backs: int = 3
    """Most rollbacks without a newer checkpoint in between; one more ends the run. Unused without a rollback."""
    roll_back_margin: int = 0
    """Steps before the bad one whose data is also omitted. Unused without a rollback."""
    layer_stats_every: int = 200
    """Steps between measurements of each layer's gradient, weight and activation norms. 0: never."""
    noise_scale_every: int = 0
    """Steps between measurements of the gradient noise scale, the global batch above which more samples per step hardly
    help. Needs two micro-batches per step, or replicas (ddp, zero1). 0: never."""
    grad_norm_max: float = 10.0
    """Gradient norm above which to warn. 0: never."""
    grad_norm_usual: float = 5.0
    """Median gradient norm of the last 100 steps above which to warn. 0: never."""
    grad_norm_min: float = 1e-6
    """Warn if the gradient norm stays below this. 0: never, not even for a single layer."""
    clipped_share: float = 0.5
    """Share of clipped steps among the last 100 above which to warn. 0: never."""
    loss_trend: bool = True
    """Warn if the loss does not fall, oscillates without falling or levels off near its start, or if its gap to the
    validation loss widens."""
    slowdown: float = 0.1
    """Relative drop below the run's earlier throughput at which to warn. 0: never."""

    def __post_init__(self) -> None:
        for name in ("max_skipped", "spike_deviations", "spike_window"):
            check_positive(name, getattr(self, name))
        for name in (
            "max_roll_backs",
            "roll_back_margin",
            "layer_stats_every",
            "noise_scale_every",
            "grad_norm_max",
            "grad_norm_usual",
            "grad_norm_min",
            "clipped_share",
            "slowdown",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more")
        for name in ("clipped_share", "slowdown"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        if self.spike_window < 16:
            raise ValueError(f"spike_window = {self.spike_window}: must be 16 or more to estimate the usual spread")

    @property
    def can_roll_back(self) -> bool:
        return self.on_divergence == "roll-back" or self.spike == "roll-back"

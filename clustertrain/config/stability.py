"""The ``[stability]`` table: what is watched in each step, and what follows when training goes wrong."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

DivergenceAction = Literal["stop", "roll-back"]


class StabilitySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step whose loss or gradient is not finite is skipped, on all ranks alike."""

    max_skipped: int = 10  # so many steps skipped one after the other are too many
    then: DivergenceAction = (
        "stop"  # after too many: end the run, or go back to a checkpoint and leave out the data since
    )
    spike: Literal["off", "warn", "skip", "roll-back"] = "warn"  # a loss far above its recent ones
    spike_deviations: float = 8.0  # how far: in robust standard deviations of the last spike_window losses
    spike_window: int = 128  # steps
    max_roll_backs: int = 3  # without a newer checkpoint between; one more ends the run
    roll_back_margin: int = 0  # steps before the bad one whose data is left out too
    layers_every: int = 200  # steps between norms of each layer's gradients and weights, and of activations; 0: never
    grad_norm_limit: float = 10.0  # a warning above it; 0: none
    vanishing: float = 1e-6  # a warning when the gradient norm stays below it; 0: none
    clipped_share: float = 0.5  # a warning when more than this share of the last 100 steps was clipped; 0: none
    slowdown: float = 0.1  # a warning when throughput falls by this share below the run's own; 0: none

    def __post_init__(self) -> None:
        for name in ("max_skipped", "spike_deviations", "spike_window"):
            check_positive(name, getattr(self, name))
        for name in (
            "max_roll_backs",
            "roll_back_margin",
            "layers_every",
            "grad_norm_limit",
            "vanishing",
            "clipped_share",
            "slowdown",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more")
        for name in ("clipped_share", "slowdown"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        if self.spike_window < 16:
            raise ValueError(f"spike_window = {self.spike_window}: fewer than 16 steps say nothing of the usual spread")

    @property
    def can_roll_back(self) -> bool:
        return self.then == "roll-back" or self.spike == "roll-back"

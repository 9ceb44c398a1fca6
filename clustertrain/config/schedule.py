"""The ``[schedule]`` table: the learning rate as a function of the step."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

ScheduleKind = Literal["cosine", "linear", "step", "one-cycle", "plateau", "wsd", "constant"]

DEFAULT_WARMUP = 0.02  # of the steps
DEFAULT_COOLDOWN = 0.2  # of the steps; arXiv 2405.18392 finds no gain beyond this


class ScheduleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[schedule]`` table: linear warmup to ``optim.lr`` (the peak), then the decay of ``kind``.

    A key that does not belong to the kind in use is refused.
    """

    kind: ScheduleKind = "cosine"
    """Shape of the decay. ``"wsd"`` is warmup, stable, decay; ``"plateau"`` reduces the rate when the deciding metric
    stops improving."""
    warmup_steps: int = -1
    """Steps of linear warmup from 0. -1: 2 % of the steps. Unused by one-cycle."""
    warmup_ratio: float | None = None
    """Warmup as a fraction of the steps, instead of ``warmup_steps``. Unset: none."""
    warmup_epochs: float | None = None
    """Warmup in epochs, instead of ``warmup_steps``. Unset: none."""
    floor: float = 0.1
    """Final rate as a fraction of the peak for cosine, linear and wsd; lowest rate for plateau. Unused by the others.
    """
    milestones: tuple[int, ...] = ()
    """Step schedule: steps after which the rate is multiplied by ``gamma``. Empty: at one and two thirds of the run."""
    milestone_epochs: tuple[float, ...] = ()
    """Step schedule: milestones in epochs, instead of ``milestones``."""
    gamma: float = 0.1
    """Step schedule: factor at each milestone."""
    cooldown_steps: int = -1
    """WSD: steps of the final linear decay to the floor. -1: 20 % of the steps."""
    rise: float = 0.3
    """One-cycle: share of the steps before the peak."""
    initial: float = 0.04
    """One-cycle: first rate as a fraction of the peak."""
    final: float = 1e-4
    """One-cycle: last rate as a fraction of the first."""
    cycle_momentum: bool = True
    """One-cycle: move the momentum (the first beta of Adam-type optimizers) against the rate. Unused by adafactor and
    adamw8bit."""
    max_momentum: float = 0.95
    """One-cycle: momentum in the first and the last step."""
    min_momentum: float = 0.85
    """One-cycle: momentum at the peak of the rate."""
    factor: float = 0.5
    """Plateau: factor by which the rate is reduced."""
    patience: int = 5
    """Plateau: evaluations without improvement that are tolerated; the next one reduces the rate."""
    threshold: float = 1e-4
    """Plateau: smallest relative change that counts as an improvement."""

    def __post_init__(self) -> None:
        for name, share in (("warmup_steps", "2 %"), ("cooldown_steps", "20 %")):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more (-1: {share} of the steps)")
        if self.warmup_ratio is not None and not 0.0 <= self.warmup_ratio < 1.0:
            raise ValueError(
                f"warmup_ratio = {self.warmup_ratio}: must be 0 or more and below 1, a fraction of the steps"
            )
        if self.warmup_epochs is not None and self.warmup_epochs < 0:
            raise ValueError(f"warmup_epochs = {self.warmup_epochs}: must be 0 or more")
        check_range("floor", self.floor, 0.0, 1.0)
        for name in ("gamma", "rise", "initial", "final", "factor"):
            check_positive(name, getattr(self, name))
            check_range(name, getattr(self, name), 0.0, 1.0)
        for name in ("max_momentum", "min_momentum"):
            check_range(name, getattr(self, name), 0.0, 0.999999)
        if self.min_momentum > self.max_momentum:
            raise ValueError(f"min_momentum = {self.min_momentum}: must be max_momentum = {self.max_momentum} or less")
        if self.rise == 1.0:
            raise ValueError("rise = 1.0 leaves no steps for the decay: must be below 1")
        if self.factor == 1.0:
            raise ValueError("factor = 1.0 changes nothing: must be below 1")
        check_positive("patience", self.patience)
        check_range("threshold", self.threshold, 0.0, 1.0)
        if any(b <= a for a, b in zip((0, *self.milestones), self.milestones, strict=False)):
            raise ValueError(f"milestones = {list(self.milestones)}: must be steps of 1 or more in ascending order")
        if any(b <= a for a, b in zip((0.0, *self.milestone_epochs), self.milestone_epochs, strict=False)):
            raise ValueError(
                f"milestone_epochs = {list(self.milestone_epochs)}: must be greater than 0 and in ascending order"
            )

    def resolve_warmup_steps(self, total_steps: int) -> int:
        """Return the warmup steps in a run of ``total_steps``."""
        if self.warmup_steps >= 0:
            return self.warmup_steps
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * total_steps)
        return max(1, round(DEFAULT_WARMUP * total_steps))

    def resolve_cooldown_steps(self, total_steps: int) -> int:
        """Return the cooldown steps of ``wsd`` in a run of ``total_steps``."""
        return self.cooldown_steps if self.cooldown_steps >= 0 else round(DEFAULT_COOLDOWN * total_steps)

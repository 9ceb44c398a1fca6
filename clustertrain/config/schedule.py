"""The ``[schedule]`` table: the learning rate as a function of the step."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

ScheduleKind = Literal["cosine", "linear", "step", "one-cycle", "plateau", "wsd", "constant"]

DEFAULT_WARMUP = 0.02  # of the steps
DEFAULT_COOLDOWN = 0.2  # of the steps: arXiv 2405.18392 finds no gain beyond it


class ScheduleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Linear warmup to ``optim.lr``, the peak, then as ``kind`` says. What does not belong to it is refused."""

    kind: ScheduleKind = "cosine"
    warmup_steps: int = -1  # -1: 2 % of the steps
    floor: float = 0.1  # the last rate, as a fraction of the peak: cosine, linear, wsd; the least of plateau
    milestones: tuple[int, ...] = ()  # step: after these the rate is multiplied by gamma; (): thirds of the run
    gamma: float = 0.1  # step
    cooldown_steps: int = -1  # wsd: linear to the floor at the end; -1: 20 % of the steps
    rise: float = 0.3  # one-cycle: this share of the steps goes up to the peak
    initial: float = 0.04  # one-cycle: the first rate, as a fraction of the peak
    final: float = 1e-4  # one-cycle: the last rate, as a fraction of the first
    factor: float = 0.5  # plateau: the rate is multiplied by it
    patience: int = 5  # plateau: so many evaluations without a better value are borne, the next one does that
    threshold: float = 1e-4  # plateau: by how much, as a fraction, a value must be better to count

    def __post_init__(self) -> None:
        for name, share in (("warmup_steps", "2 %"), ("cooldown_steps", "20 %")):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more (-1: {share} of the steps)")
        check_range("floor", self.floor, 0.0, 1.0)
        for name in ("gamma", "rise", "initial", "final", "factor"):
            check_positive(name, getattr(self, name))
            check_range(name, getattr(self, name), 0.0, 1.0)
        if self.rise == 1.0:
            raise ValueError("rise = 1.0 leaves no step to go down in: must be below 1")
        if self.factor == 1.0:
            raise ValueError("factor = 1.0 changes nothing: must be below 1")
        check_positive("patience", self.patience)
        check_range("threshold", self.threshold, 0.0, 1.0)
        if any(b <= a for a, b in zip((0, *self.milestones), self.milestones, strict=False)):
            raise ValueError(f"milestones = {list(self.milestones)}: must be steps in rising order, from 1 on")

    def resolve_warmup_steps(self, total_steps: int) -> int:
        """Its steps in a run of ``total_steps``."""
        return self.warmup_steps if self.warmup_steps >= 0 else max(1, round(DEFAULT_WARMUP * total_steps))

    def resolve_cooldown_steps(self, total_steps: int) -> int:
        """Of ``wsd``: its steps in a run of ``total_steps``."""
        return self.cooldown_steps if self.cooldown_steps >= 0 else round(DEFAULT_COOLDOWN * total_steps)

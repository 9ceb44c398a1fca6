"""The ``[contract]`` table: what the run is for, by what it is judged, and what it may cost."""

from __future__ import annotations

from typing import Literal

import msgspec

MetricMode = Literal["auto", "min", "max"]
Target = Literal["", "research", "production", "fine-tune", "benchmark"]


class ContractSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Kept in the run's record. The budget counts all attempts of the run."""

    task: str = ""  # in words
    metric: str = ""  # decides what is best: a logged scalar, with validation data one of these; "": (validation_)loss
    mode: MetricMode = "auto"  # auto: max for accuracy, top5 and recall_at_1, else min
    slices: tuple[str, ...] = ()  # of the validation data, where a regression is not acceptable
    target: Target = ""
    gpu_hours: float = 0.0  # 0: no limit
    wall_hours: float = 0.0  # with nodes, without the queue; 0: no limit
    cost: float = 0.0  # in the money of gpu_hour_cost; 0: no limit
    gpu_hour_cost: float = 0.0
    when_spent: Literal["stop", "warn"] = "stop"  # stop: with a checkpoint, and without a requeue
    resume: Literal["elastic", "exact"] = "elastic"  # exact: only with layout, ranks, versions, data and code as before

    def __post_init__(self) -> None:
        for name in ("gpu_hours", "wall_hours", "cost", "gpu_hour_cost"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (no limit) or more")
        if self.cost and not self.gpu_hour_cost:
            raise ValueError(f"cost = {self.cost:g} is no limit without gpu_hour_cost: say what a GPU-hour costs")
        if len(set(self.slices)) < len(self.slices):
            raise ValueError(f"slices = {list(self.slices)}: one is named twice")

    @property
    def has_budget(self) -> bool:
        return bool(self.gpu_hours or self.wall_hours or self.cost)

"""The ``[contract]`` table: purpose, deciding metric and budget of a run."""

from __future__ import annotations

from typing import Literal

import msgspec

MetricMode = Literal["auto", "min", "max"]
Target = Literal["", "research", "production", "fine-tune", "benchmark"]


class ContractSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[contract]`` table. The run's record keeps it; the budget counts all attempts of the run."""

    task: str = ""
    """Description of the task, free text. Recorded only."""
    metric: str = ""
    """Scalar that decides which checkpoint is best and that early stopping and ``schedule.kind = "plateau"`` follow.
    Empty: ``validation_loss``, or ``loss`` without validation data."""
    mode: MetricMode = "auto"
    """Direction of ``metric``. ``"auto"``: ``"max"`` for accuracy, top5, recall_at_1 and reward_accuracy, otherwise
    ``"min"``."""
    slices: tuple[str, ...] = ()
    """Slices of the validation data on which a regression is unacceptable; reports compare their latest value with
    their best."""
    target: Target = ""
    """Intended use of the result. Recorded only. Empty: unspecified."""
    gpu_hours: float = 0.0
    """Budget in GPU-hours. 0: no limit."""
    wall_hours: float = 0.0
    """Budget in hours during which the run holds nodes; time in the queue does not count. 0: no limit."""
    cost: float = 0.0
    """Budget in the currency of ``gpu_hour_cost``, which it requires. 0: no limit."""
    gpu_hour_cost: float = 0.0
    """Price of a GPU-hour. Unused without a budget."""
    on_budget_spent: Literal["stop", "warn"] = "stop"
    """Action when the budget is spent. ``"stop"``: save a checkpoint and end without a requeue. ``"warn"``: raise an
    alert and continue. Unused without a budget."""
    resume: Literal["elastic", "exact"] = "elastic"
    """Condition for a resume. ``"elastic"``: layout and number of ranks may change. ``"exact"``: layout, ranks,
    versions, data and code must be unchanged."""

    def __post_init__(self) -> None:
        for name in ("gpu_hours", "wall_hours", "cost", "gpu_hour_cost"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (no limit) or more")
        if self.cost and not self.gpu_hour_cost:
            raise ValueError(f"cost = {self.cost:g} has no effect without gpu_hour_cost: set the price of a GPU-hour")
        if len(set(self.slices)) < len(self.slices):
            raise ValueError(f"slices = {list(self.slices)}: contains a duplicate")

    @property
    def has_budget(self) -> bool:
        return bool(self.gpu_hours or self.wall_hours or self.cost)

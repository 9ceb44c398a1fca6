"""The ``[objective]`` table: what is minimised."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

ObjectiveKind = Literal["auto", "cross-entropy", "binary-cross-entropy", "mse", "l1", "huber", "nt-xent"]


class ObjectiveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What does not belong to the kind in use is refused."""

    kind: ObjectiveKind = "auto"  # cross-entropy; of a two-tower model nt-xent; of an entry its own loss, if it has one
    label_smoothing: float = 0.0  # cross-entropy
    ignore_index: int = -100  # cross-entropy: targets of this value count nothing
    delta: float = 1.0  # huber: from here on linear
    temperature: float = 0.1  # nt-xent of an entry that returns two embeddings; two-tower models have their own

    def __post_init__(self) -> None:
        check_range("label_smoothing", self.label_smoothing, 0.0, 0.9)
        check_positive("delta", self.delta)
        check_range("temperature", self.temperature, 0.001, 10.0)

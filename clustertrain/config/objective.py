"""The ``[objective]`` table: the loss function."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

ObjectiveKind = Literal["auto", "cross-entropy", "binary-cross-entropy", "mse", "l1", "huber", "nt-xent", "dpo"]


class ObjectiveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[objective]`` table. A key that does not belong to the kind in use is refused."""

    kind: ObjectiveKind = "auto"
    """Loss function. ``"auto"``: ``"nt-xent"`` for two-tower models, otherwise ``"cross-entropy"``; the loss that a
    model entry computes itself takes precedence. ``"dpo"``: direct preference optimization (Rafailov et al., arXiv
    2305.18290) of the built-in decoder, on chat data with pairs of a chosen and a rejected answer."""
    label_smoothing: float = 0.0
    """Cross-entropy: share of each target that is spread over all classes."""
    ignore_index: int = -100
    """Cross-entropy and DPO: targets with this value are excluded from the loss."""
    delta: float = 1.0
    """Huber: absolute error at which the loss turns from quadratic to linear."""
    temperature: float = 0.1
    """NT-Xent of a model entry that returns a pair of embeddings. Two-tower models use ``model.two_tower.temperature``.
    """

    group: int = 0
    """NT-Xent: samples that are compared with each other. They are neighbors in the global batch, share a micro-batch,
    and are each other's negatives. 0: the whole global batch, over all ranks and micro-batches, for layouts without
    ``tp``, ``cp`` and ``pp``; with several micro-batches per step the model then runs forward twice."""
    beta: float = 0.1
    """DPO: how strongly the model is held to its start weights. The smaller, the further it may move away."""

    def __post_init__(self) -> None:
        check_range("label_smoothing", self.label_smoothing, 0.0, 0.9)
        check_positive("delta", self.delta)
        check_range("temperature", self.temperature, 0.001, 10.0)
        if self.group < 0 or self.group == 1:
            raise ValueError(
                f"group = {self.group}: must be 0 (the whole global batch), or 2 or more, to compare a sample with at "
                "least one other"
            )
        check_range("beta", self.beta, 0.001, 100.0)

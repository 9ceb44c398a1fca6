"""The ``[evaluation]`` table: when and by which metrics the model is evaluated on validation data."""

from __future__ import annotations

from typing import Literal

import msgspec

MetricName = Literal[
    "accuracy", "top5", "perplexity", "bits_per_token", "recall_at_1", "mae", "rmse", "reward_accuracy"
]
# validation_loss is always available in addition.
HIGHER_IS_BETTER = frozenset({"accuracy", "top5", "recall_at_1", "reward_accuracy"})
VALIDATION_PREFIX = "validation_"  # of metric names: validation_loss, validation_accuracy, …
SLICE_SEPARATOR = "/"  # validation_accuracy/night is the accuracy on the slice night


class EvaluationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[evaluation]`` table. Unused without validation data.

    The last step of the run is always evaluated.
    """

    every: int = 0
    """Steps between evaluations. 0: ten evaluations in the run."""
    every_epochs: float = 0.0
    """Epochs between evaluations, instead of ``every``. 0: none."""
    samples: int = 0
    """Most samples per evaluation, from the first on. 0: all."""
    micro_batch: int = 0
    """Samples per rank and forward pass. 0: as in training."""
    metrics: tuple[MetricName, ...] = ()
    """Metrics in addition to the loss. Empty: accuracy for classes, also perplexity and bits_per_token on text;
    recall_at_1 for NT-Xent; mae for regression; reward_accuracy, the share of pairs whose chosen answer gained more
    than the rejected one, for DPO."""
    save_predictions: int = 0
    """Save the targets and predictions of the first N samples in the run's folder, for the best and the last
    evaluation; for a classifier also a confusion matrix of all samples. 0: none. Not for NT-Xent, DPO and cp."""
    patience: int = 0
    """Consecutive evaluations without a better deciding metric after which the run ends. 0: never."""
    patience_epochs: float = 0.0
    """Epochs without a better deciding metric after which the run ends, instead of ``patience``. 0: never."""
    warn_when_rising: int = 3
    """Consecutive evaluations with a rising loss after which to warn. 0: never."""

    def __post_init__(self) -> None:
        for name in (
            "every",
            "every_epochs",
            "samples",
            "micro_batch",
            "save_predictions",
            "patience",
            "patience_epochs",
            "warn_when_rising",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more")
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"metrics = {list(self.metrics)}: contains a duplicate")

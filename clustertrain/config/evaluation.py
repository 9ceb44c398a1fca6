"""The ``[evaluation]`` table: when the model is measured on data that it does not learn from, and by what."""

from __future__ import annotations

from typing import Literal

import msgspec

MetricName = Literal["accuracy", "top5", "perplexity", "bits_per_token", "recall_at_1", "mae", "rmse"]
# Whether more is better; validation_loss is there always.
HIGHER_IS_BETTER = frozenset({"accuracy", "top5", "recall_at_1"})
VALIDATION_PREFIX = "validation_"  # of the names in the rows: validation_loss, validation_accuracy, …
SLICE_SEPARATOR = "/"  # validation_accuracy/night is that of the slice night


class EvaluationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """There is one where ``data.validation`` says what to evaluate on, and at the end of the run always."""

    every: int = 0  # steps; 0: ten times in the run
    samples: int = 0  # at most so many; 0: all
    micro_batch: int = 0  # samples a rank and forward pass; 0: as in training
    metrics: tuple[MetricName, ...] = ()  # besides the loss; (): what goes with the objective
    patience: int = 0  # evaluations without a better deciding metric after which the run ends; 0: none
    rising: int = 3  # evaluations in a row with a rising loss that are worth a warning; 0: none

    def __post_init__(self) -> None:
        for name in ("every", "samples", "micro_batch", "patience", "rising"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more")
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"metrics = {list(self.metrics)}: one is named twice")

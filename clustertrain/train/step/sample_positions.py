"""Which samples of the run a batch holds, also where the script has transformed it since a loader handed it out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from clustertrain.errors import UsageError
from clustertrain.train.data.loader import Loader


class SamplePositions:
    """Looks at what the ``loaders``, a list that may grow, have handed out since it was last asked."""

    def __init__(self, loaders: list[Loader]) -> None:
        self._loaders = loaders
        self._last_loaders: list[Loader] = []

    def for_batch(self, batch: Any) -> list[torch.Tensor] | None:
        """By micro-batch the place of each sample; None where they cannot be told and nothing is miscounted for it.

        Raises:
            UsageError: they cannot be told, and some of the samples may be there to fill a gap in a ragged batch.
        """
        unconsumed = [loader for loader in self._loaders if loader.is_unconsumed]
        for loader in unconsumed:
            loader.is_unconsumed = False
        self._last_loaders = unconsumed or self._last_loaders
        source = next((loader for loader in self._loaders if loader.last_item is batch), None)
        if source is not None:
            return source.sample_positions
        sizes = _micro_batch_sizes(batch)
        matching = [loader for loader in unconsumed if [len(p) for p in loader.sample_positions] == sizes]
        if len(matching) == 1:
            return matching[0].sample_positions
        if any(loader.ragged for loader in self._last_loaders):
            raise UsageError(
                f"train_step: a loader's global batch does not divide over ranks and micro-batches, and in this batch, "
                f"with micro-batches of {sizes} samples, it cannot be told which of them count",
                fix="take one batch from the loader for each step and keep the number and sizes of its micro-batches, "
                "or choose a global_batch that divides",
            )
        return None


def _micro_batch_sizes(batch: Any) -> list[int | None]:
    """How many samples each micro-batch has, None for one without a tensor."""
    micro_batches = batch if isinstance(batch, list) else [batch]
    return [
        next((len(t) for t in pytree.tree_leaves(m) if isinstance(t, torch.Tensor) and t.dim()), None)
        for m in micro_batches
    ]

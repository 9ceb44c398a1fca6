"""Identification of the samples in a batch, even after the script has transformed what a loader returned."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from clustertrain.errors import UsageError
from clustertrain.train.data.loader import Loader


class SamplePositions:
    """Matcher of batches to what the loaders have returned since the last call; the list of loaders may grow."""

    def __init__(self, loaders: list[Loader]) -> None:
        self._loaders = loaders
        self._last_loaders: list[Loader] = []

    def for_batch(self, batch: object) -> list[torch.Tensor] | None:
        """Return each micro-batch's sample positions in the run, (samples,) each; None if unknown and not needed.

        Raises:
            UsageError: the positions are unknown, and some samples may be padding of a ragged batch.
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
                "train_step: a loader's global batch does not divide over ranks and micro-batches, so some samples are "
                f"padding; this batch, with micro-batches of {sizes} samples, does not show which ones",
                fix="take one batch from the loader per step and keep the number and sizes of its micro-batches, "
                "or choose a global_batch that divides",
            )
        return None


def _micro_batch_sizes(batch: object) -> list[int | None]:
    """Return the number of samples in each micro-batch; None for a micro-batch without a tensor."""
    micro_batches = batch if isinstance(batch, list) else [batch]
    return [
        next((len(t) for t in pytree.tree_leaves(m) if isinstance(t, torch.Tensor) and t.dim()), None)
        for m in micro_batches
    ]

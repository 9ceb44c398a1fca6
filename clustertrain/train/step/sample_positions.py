"""Which samples of the run a batch holds, also where the script has transformed it since a loader handed it out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from clustertrain.errors import UsageError
from clustertrain.train.data.loader import Loader


class Places:
    """Looks at what the ``loaders``, a list that may grow, have handed out since it was last asked."""

    def __init__(self, loaders: list[Loader]) -> None:
        self._loaders = loaders
        self._last: list[Loader] = []

    def of(self, batch: Any) -> list[torch.Tensor] | None:
        """By micro-batch the place of each sample; None where they cannot be told and nothing is miscounted for it.

        Raises:
            UsageError: they cannot be told, and some of the samples may be there to fill a gap in a ragged batch.
        """
        fresh = [loader for loader in self._loaders if loader.fresh]
        for loader in fresh:
            loader.fresh = False
        self._last = fresh or self._last
        own = next((loader for loader in self._loaders if loader.latest is batch), None)
        if own is not None:
            return own.places
        sizes = _sizes(batch)
        alike = [loader for loader in fresh if [len(p) for p in loader.places] == sizes]
        if len(alike) == 1:
            return alike[0].places
        if any(loader.ragged for loader in self._last):
            raise UsageError(
                f"train_step: a loader's global batch does not divide over ranks and micro-batches, and in this batch, "
                f"with micro-batches of {sizes} samples, it cannot be told which of them count",
                fix="take one batch from the loader for each step and keep the number and sizes of its micro-batches, "
                "or choose a global_batch that divides",
            )
        return None


def _sizes(batch: Any) -> list[int | None]:
    """How many samples each micro-batch has, None for one without a tensor."""
    micro_batches = batch if isinstance(batch, list) else [batch]
    return [
        next((len(t) for t in pytree.tree_leaves(m) if isinstance(t, torch.Tensor) and t.dim()), None)
        for m in micro_batches
    ]

"""Evaluation of a loss that compares samples of different ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from clustertrain.errors import ConfigError
from clustertrain.train.evaluation.metrics import EvalMetric, MetricTerms, compute_terms
from clustertrain.train.models import contrastive
from clustertrain.train.models.contrastive import ContrastiveLoss, Embeddings
from clustertrain.train.step.whole_batch import gather


class CollectedEmbeddings:
    """Embeddings of this rank's samples, which are compared after the pass over the dataset.

    The groups are adjacent samples of the dataset, so they do not depend on the layout.
    """

    def __init__(self, loss: ContrastiveLoss) -> None:
        self._loss = loss
        self._parts: list[tuple[Embeddings, torch.Tensor]] = []

    def add(self, output: object, target: object, sample_indices: Sequence[int]) -> None:
        """Add a micro-batch, whose first samples have these indices in the dataset; the others are padding."""
        embeddings = contrastive.embed(self._loss, output, target)
        count = len(sample_indices)
        ids = None if embeddings.ids is None else embeddings.ids[:count]
        keys = torch.tensor(sample_indices, dtype=torch.int64).to(embeddings.first.device, non_blocking=True)
        self._parts.append((embeddings.with_rows(embeddings.pack()[:count], ids), keys))

    def compute_sums(self, metrics: Sequence[EvalMetric], group: int, device: torch.device) -> torch.Tensor:
        """Return (sum, count) of the loss and of each metric over this rank's groups, (1 + metrics, 2) in fp64.

        Collective. Metrics get the similarities (1, group, group) and the indices of the samples in the dataset.

        Args:
            group: samples per group, of which an incomplete last one is dropped; 0, or more than there are: all.

        Raises:
            ConfigError: there are fewer than two samples, or a metric does not support similarities.
        """
        everything, keys = self._gather_sorted()
        size = min(group, len(keys)) or len(keys)
        if size < 2:
            raise ConfigError(
                f"the validation data has {len(keys)} samples, and the loss compares samples with each other",
                fix="use more of it (evaluation.samples, data.validation)",
            )
        sums = torch.zeros(1 + len(metrics), 2, dtype=torch.float64, device=device)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        packed = everything.pack()
        for first in range(rank * size, len(keys) - size + 1, ranks * size):
            rows = slice(first, first + size)
            ids = None if everything.ids is None else everything.ids[rows]
            compared = everything.with_rows(packed[rows], ids).grouped(size)
            terms: list[MetricTerms] = [(contrastive.row_losses(compared, compared).sum(), size)]
            similarities = contrastive.similarities(compared)
            terms += [compute_terms(metric, similarities, keys[rows], -100) for metric in metrics]
            for i, (total, count) in enumerate(terms):
                sums[i] += torch.stack([total.double(), torch.as_tensor(count, device=device).double()])
        return sums

    def _gather_sorted(self) -> tuple[Embeddings, torch.Tensor]:
        """Return the embeddings of all ranks in the order of the dataset, and the samples' indices."""
        one = self._parts[0][0]
        packed = torch.cat([e.pack() for e, _ in self._parts])
        keys = torch.cat([k for _, k in self._parts])
        ids = keys if one.ids is None else torch.cat([e.ids for e, _ in self._parts if e.ids is not None])
        counts = gather(torch.full((1,), len(packed), device=packed.device)).tolist()
        missing = max(counts) - len(packed)
        all_packed = gather(F.pad(packed, (0, 0, 0, missing)))
        all_keys, all_ids = gather(F.pad(torch.stack([keys, ids], 1), (0, 0, 0, missing), value=-1)).unbind(1)
        order = all_keys.argsort()[max(counts) * len(counts) - sum(counts) :]  # padding comes first
        embeddings = one.with_rows(all_packed[order], None if one.ids is None else all_ids[order])
        return embeddings, all_keys[order]

"""The contrastive loss: each sample must identify its partner among the samples that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.errors import ConfigError, UsageError


@dataclass(frozen=True)
class Embeddings:
    """Two fp32 unit embeddings of each sample."""

    first: torch.Tensor
    """(…, samples, dim)."""
    second: torch.Tensor
    """(…, samples, dim)."""
    scale: torch.Tensor | float
    """Inverse of the temperature, 0-dimensional."""
    ids: torch.Tensor | None
    """(…, samples) int64: samples with equal ids are not negatives of each other. None: all are different."""
    two_sided: bool
    """A first embedding is compared only with second ones, and the reverse. Otherwise each is compared with all."""

    def __len__(self) -> int:
        return self.first.shape[-2]

    def pack(self) -> torch.Tensor:
        """Return both embeddings side by side: (…, samples, 2 dim)."""
        return torch.cat([self.first, self.second], -1)

    def with_rows(self, packed: torch.Tensor, ids: torch.Tensor | None) -> Embeddings:
        """Return embeddings of other samples, which :meth:`pack` returned, with the same scale."""
        first, second = packed.chunk(2, -1)
        return replace(self, first=first, second=second, ids=ids)

    def grouped(self, size: int) -> Embeddings:
        """Return groups of ``size`` adjacent samples: (groups, size, dim)."""

        def split(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(-1, size, *t.shape[1:])

        ids = None if self.ids is None else split(self.ids)
        return replace(self, first=split(self.first), second=split(self.second), ids=ids)


@dataclass(frozen=True)
class ContrastiveLoss:
    """The NT-Xent loss of two embeddings of each sample, for :meth:`Session.train_step` and :meth:`Session.evaluate`.

    The model returns a pair (first, second) of tensors (batch, dim), two views of the same samples. Each view must
    identify its partner among all other views by cosine similarity (Chen et al., arXiv 2002.05709, equation 1). Or it
    returns a triple (first, second, scale) of two encoders. Each first embedding must identify its second one among the
    second ones, and the reverse (Radford et al., arXiv 2103.00020, figure 3); ``scale``, a tensor of one element, is
    the inverse of the temperature, which the model may learn.

    Args:
        temperature: temperature of a pair's similarities; unused with a triple.
        group: samples that are compared with each other: neighbors in the global batch, which share a micro-batch. 0:
            all samples of the global batch, on all ranks and in all micro-batches.
        ids_in_targets: the targets are int64 ids of the samples, and equal ones are not negatives of each other: at the
            end of an epoch, a global batch may contain one sample twice.

    Raises:
        UsageError: the temperature is not above 0, or the group is 1 or below 0.
    """

    temperature: float = 0.1
    group: int = 0
    ids_in_targets: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"ContrastiveLoss: temperature = {self.temperature!r} must be more than 0")
        if self.group < 0 or self.group == 1:
            raise UsageError(
                f"ContrastiveLoss: group = {self.group!r} must be 0 (the whole global batch), or 2 or more"
            )

    def __call__(self, output: Any, target: Any) -> tuple[torch.Tensor, int]:
        """Return (sum, count) of the loss of these samples, which are compared in groups or, without, all together.

        Raises:
            ConfigError: the model's output is neither a pair nor a triple, or the samples do not divide into groups.
        """
        embeddings = embed_groups(self, output, target)
        losses = row_losses(embeddings, embeddings)
        return losses.sum(), losses.numel()


def compares_batch(loss: object) -> TypeGuard[ContrastiveLoss]:
    """Return whether ``loss`` compares all samples of the global batch."""
    return isinstance(loss, ContrastiveLoss) and not loss.group


def embed(loss: ContrastiveLoss, output: Any, target: Any) -> Embeddings:
    """Return the embeddings (batch, dim) in a model's output.

    Raises:
        ConfigError: the output is neither a pair nor a triple, or the targets are not one id per sample.
    """
    if not _is_pair_or_triple(output):
        raise ConfigError(
            "the loss nt-xent: the model did not return a pair of embeddings of one shape (batch, dim)",
            fix="return (first, second), the embeddings of the two views of each sample; or (first, second, scale) of "
            "two encoders, with the inverse of the temperature",
        )
    first, second = (
        F.normalize((t.full_tensor() if is_dtensor(t) else t).float(), dim=-1)  # fp32: bf16 has 8 bits of precision
        for t in output[:2]
    )
    two_sided = len(output) == 3
    scale = output[2].float().reshape(()) if two_sided else 1 / loss.temperature
    return Embeddings(first, second, scale, _read_ids(target, len(first)) if loss.ids_in_targets else None, two_sided)


def embed_groups(loss: ContrastiveLoss, output: Any, target: Any) -> Embeddings:
    """Return the embeddings in a model's output in groups of samples that are compared, (groups, group, dim).

    Raises:
        ConfigError: as :func:`embed`; or the samples do not divide into groups.
    """
    embeddings = embed(loss, output, target)
    size = loss.group or len(embeddings)
    if not size or len(embeddings) % size:
        raise ConfigError(
            f"a micro-batch of {len(embeddings)} does not divide into groups of {size} (objective.group)",
            fix="set train.micro_batch to a multiple of the group, and a global batch that divides evenly; or "
            "objective.group = 0, to compare the whole global batch",
        )
    return embeddings.grouped(size)


def similarities(embeddings: Embeddings) -> torch.Tensor:
    """Return the similarities of each first to each second embedding of its group, (groups, group, group)."""
    with torch.autocast(embeddings.first.device.type, enabled=False):
        return embeddings.first @ embeddings.second.mT * embeddings.scale


def row_losses(rows: Embeddings, columns: Embeddings, first: int = 0) -> torch.Tensor:
    """Return the loss of each sample in ``rows``, (…, rows), compared with all ``columns``.

    Args:
        first: index in ``columns`` of the first sample in ``rows``; the others follow it.
    """
    count, total, device = len(rows), len(columns), rows.first.device
    own = torch.arange(first, first + count, device=device)
    duplicates = None
    if rows.ids is not None and columns.ids is not None:
        same = rows.ids[..., :, None] == columns.ids[..., None, :]
        duplicates = same & (own[:, None] != torch.arange(total, device=device))
    with torch.autocast(device.type, enabled=False):
        if columns.two_sided:
            to_second = rows.first @ columns.second.mT * columns.scale
            to_first = rows.second @ columns.first.mT * columns.scale
            return (_cross_entropy(to_second, own, duplicates) + _cross_entropy(to_first, own, duplicates)) / 2
        # Log-sum-exp subtracts the maximum, so a low temperature does not overflow.
        queries, views = (torch.cat([e.first, e.second], -2) for e in (rows, columns))
        excluded = torch.cat([own, total + own])[:, None] == torch.arange(2 * total, device=device)  # itself
        if duplicates is not None:
            excluded = excluded | torch.cat([torch.cat([duplicates] * 2, -1)] * 2, -2)
        losses = _cross_entropy(queries @ views.mT * columns.scale, torch.cat([total + own, own]), excluded)
        of_first, of_second = losses.chunk(2, -1)
        return (of_first + of_second) / 2


def _read_ids(target: Any, count: int) -> torch.Tensor:
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64 or target.shape != (count,):
        raise ConfigError(
            f"the loss nt-xent: the targets of {count} samples are not as many int64 ids",
            fix="let the dataset return (inputs, i) for sample i",
        )
    return target


def _is_pair_or_triple(output: Any) -> bool:
    if not (isinstance(output, (tuple, list)) and len(output) in (2, 3)):
        return False
    if not all(isinstance(t, torch.Tensor) for t in output):
        return False
    is_pair = output[0].shape == output[1].shape and output[0].dim() == 2
    return is_pair and (len(output) == 2 or output[2].numel() == 1)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, excluded: torch.Tensor | None) -> torch.Tensor:
    """Return the cross-entropy of each row of ``logits`` (…, rows, columns) with ``labels`` (rows,): (…, rows)."""
    if excluded is not None:
        logits = logits.masked_fill(excluded, -torch.inf)
    flat_labels = labels.expand(logits.shape[:-1]).flatten()
    return F.cross_entropy(logits.flatten(0, -2), flat_labels, reduction="none").view(logits.shape[:-1])

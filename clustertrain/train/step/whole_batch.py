"""Passes of a step whose loss compares all samples of the global batch, on all ranks and in all micro-batches.

The loss is computed from the embeddings of all ranks. Each rank computes the rows of its own samples, and the gradient
of the embeddings returns to their ranks by one reduction. With several micro-batches, all embeddings are needed before
the first backward pass: the model runs once without gradients, and each micro-batch again with them (Gao et al., arXiv
2101.06983). So neither the number of ranks nor that of micro-batches changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core import seeds, step_timer
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import call_model, pack_sum_count
from clustertrain.train.distributed import data_parallel, precision
from clustertrain.train.models import contrastive
from clustertrain.train.models.contrastive import ContrastiveLoss, Embeddings
from clustertrain.train.profiling.forward_timer import ForwardTimer
from clustertrain.train.stability.conditional_step import RunningStatistics


@dataclass(frozen=True)
class _Gradients:
    """Gradients of the scaled loss of all ranks."""

    embeddings: torch.Tensor
    """Of this rank's packed embeddings, (samples, 2 dim)."""
    scale: torch.Tensor | None = None
    """Of the scale, from this rank's rows; None if the model does not return it."""


class WholeBatchPasses:
    """Forward and backward passes of one rank."""

    def __init__(self, model: nn.Module, context: RankContext, forward_timer: ForwardTimer) -> None:
        self._model = model
        # Without gradients, DDP has nothing to do but to broadcast buffers.
        self._bare_model = model.module if isinstance(model, DistributedDataParallel) else model
        self._context = context
        self._forward_timer = forward_timer
        self._statistics = RunningStatistics(self._bare_model)
        self._samples = 0  # per step on each rank; 0 before the first step

    def __call__(
        self,
        micro_batches: list[Any],
        positions: Sequence[torch.Tensor | None],
        is_padding: Sequence[bool],
        loss: ContrastiveLoss,
        loss_scale: float,
    ) -> torch.Tensor:
        """Accumulate the gradients; return (sum of losses, count) of each micro-batch, (micro-batches, 2) in fp64.

        Raises:
            ConfigError: the layout splits samples or the model over ranks, or ranks have different numbers of samples.
            UsageError: this rank's number of samples changed.
        """
        check_layout(self._context)
        if len(micro_batches) == 1:
            with data_parallel.gradient_sync(self._model, last=True):
                embeddings = self._forward(self._model, micro_batches[0], positions[0], loss)
                gradients, totals = self._compare([embeddings], is_padding, loss_scale)
                self._backward(embeddings, gradients, 0, 1)
            return totals
        self._statistics.save()
        rng_states, ahead = [], []
        with torch.no_grad():
            for batch, samples in zip(micro_batches, positions, strict=True):
                rng_states.append(seeds.capture_rng_state(self._context.device))
                ahead.append(self._forward(self._bare_model, batch, samples, loss))
        self._statistics.restore_where(torch.ones((), dtype=torch.bool))
        gradients, totals = self._compare(ahead, is_padding, loss_scale)
        row, last, defer = 0, len(micro_batches) - 1, self._context.layout.defer_reduction
        for i, (batch, samples) in enumerate(zip(micro_batches, positions, strict=True)):
            seeds.restore_rng_state(rng_states[i], self._context.device)  # the same dropout as in the first pass
            with data_parallel.gradient_sync(self._model, last=i == last, defer=defer):
                embeddings = self._forward(self._model, batch, samples, loss)
                self._backward(embeddings, gradients, row, len(micro_batches))
            row += len(embeddings)
        return totals

    def _forward(self, model: nn.Module, batch: Any, samples: torch.Tensor | None, loss: ContrastiveLoss) -> Embeddings:
        inputs, target = batch
        self._forward_timer.begin()
        with step_timer.record_part("forward"), precision.autocast(self._context):
            embeddings = contrastive.embed(loss, call_model(model, inputs, samples), target)
        self._forward_timer.end()
        return embeddings

    def _backward(self, embeddings: Embeddings, gradients: _Gradients, row: int, micro_batches: int) -> None:
        """Run the backward pass of a micro-batch whose first sample is this rank's ``row``."""
        packed = embeddings.pack()
        pairs = [(packed, gradients.embeddings[row : row + len(packed)])]
        if isinstance(embeddings.scale, torch.Tensor) and gradients.scale is not None:
            # In parts, because DDP reduces only what has a gradient in the last pass.
            pairs.append((embeddings.scale, gradients.scale / micro_batches))
        outputs, grads = zip(*((t, g) for t, g in pairs if t.requires_grad), strict=True)
        with step_timer.record_part("backward"):
            torch.autograd.backward(outputs, grads)

    def _compare(
        self, micro_batches: list[Embeddings], is_padding: Sequence[bool], loss_scale: float
    ) -> tuple[_Gradients, torch.Tensor]:
        """Return the gradients, and the totals of the micro-batches. Collective."""
        sizes = [len(e) for e in micro_batches]
        self._check_samples(sum(n for n, padding in zip(sizes, is_padding, strict=True) if not padding))
        one = micro_batches[0]
        local = torch.cat([e.pack().detach() for e in micro_batches])
        local_ids = None if one.ids is None else torch.cat([e.ids for e in micro_batches if e.ids is not None])
        first = dist.get_rank() * len(local) if dist.is_initialized() else 0
        packed = gather(local).requires_grad_()
        ids = None if local_ids is None else gather(local_ids)
        leaves = [packed]
        if isinstance(one.scale, torch.Tensor):
            leaves.append(one.scale.detach().requires_grad_())
            one = replace(one, scale=leaves[1])
        with step_timer.record_part("forward"):
            columns = one.with_rows(packed, ids)
            rows = one.with_rows(packed[first : first + len(local)], local_ids)
            losses = contrastive.row_losses(rows, columns, first)
        with step_timer.record_part("backward"):
            grads = torch.autograd.grad(losses.sum() * loss_scale, leaves)
            gradients = _Gradients(reduce_scatter(grads[0], len(local)), *grads[1:])
        return gradients, _totals(losses.detach(), local, packed.detach(), sizes)

    def _check_samples(self, count: int) -> None:
        """Raise unless all ranks have ``count`` samples in each step: gathering needs equal parts."""
        if self._samples == count:
            return
        if self._samples:
            raise UsageError(
                f"train_step: this batch has {count} samples and the earlier ones {self._samples}; a loss that "
                "compares the whole global batch needs as many in each step",
                fix="use session.loader, or drop the last batch of an epoch (drop_last=True)",
            )
        # A host sync, only in the first step.
        counts = (
            gather(torch.full((1,), count, device=self._context.device)).tolist() if dist.is_initialized() else [count]
        )
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the data-parallel ranks have {', '.join(map(str, counts))} samples: a loss that compares the whole "
                "global batch needs equal parts",
                fix=f"use a global batch that divides over {len(counts)} data-parallel ranks",
            )
        self._samples = count


def check_layout(context: RankContext) -> None:
    """Raise ConfigError unless every rank has samples of its own and a whole model or shards of it."""
    layout = context.layout
    splits = [f"{n} {d}" for n, d in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if d > 1]
    if splits:
        raise ConfigError(
            f"{' x '.join(splits)}: a loss that compares the whole global batch supports data parallelism only",
            fix="remove these options; --layout fsdp shards the parameters. Or set objective.group "
            "(ContrastiveLoss(group=...)), to compare inside a micro-batch",
        )


def gather(local: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks in their order; ``local`` has the same shape on each. Collective."""
    if not dist.is_initialized():
        return local.clone()
    gathered = local.new_empty(dist.get_world_size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local.contiguous())
    return gathered


def reduce_scatter(gathered: torch.Tensor, count: int) -> torch.Tensor:
    """Return this rank's ``count`` rows of the sum of ``gathered`` over the ranks. Collective."""
    if not dist.is_initialized():
        return gathered
    local = gathered.new_empty(count, *gathered.shape[1:])
    dist.reduce_scatter_tensor(local, gathered.contiguous())
    return local


def _totals(losses: torch.Tensor, local: torch.Tensor, packed: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return (sum of losses, count) of each micro-batch.

    One NaN among the embeddings makes the loss of all samples NaN. The totals then show only the micro-batches that
    the NaN comes from, so that the step names their samples.
    """
    is_spoiled = ~packed.isfinite().all()
    totals = []
    for part, rows in zip(torch.split(losses.double(), sizes), torch.split(local, sizes), strict=True):
        origin = torch.where(rows.isfinite().all(), 0.0, torch.nan).double()
        totals.append(pack_sum_count(torch.where(is_spoiled, origin, part.sum()), len(part)))
    return torch.stack(totals)

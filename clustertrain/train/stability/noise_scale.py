"""The gradient noise scale: the global batch above which more samples per step hardly improve the gradient.

McCandlish et al., arXiv 1812.06162, appendix A.1: the squared norms of gradients over two batch sizes give unbiased
estimates of the squared norm of the true gradient, |G|^2, and of the variance of a sample's gradient, tr(S). Each is
averaged over the measurements before their ratio is taken, since a ratio of single estimates is biased.

The small batch is the first micro-batch of the step: of one rank where ranks hold whole gradients, of all ranks where
they hold shards. Its gradient is measured before the others are added, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.grad_norm import local_squared_norm

DECAY = 0.9  # weight of the earlier measurements
PACKED_VALUES = 3


class NoiseScale:
    """Averages of the measurements, equal on all ranks and saved in checkpoints."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._is_sharded = context.layout.is_fully_sharded
        self._averages = torch.zeros(2, dtype=torch.float64, device=context.device)  # of tr(S) and |G|^2

    def syncs_small_batch(self) -> bool:
        """Return whether the gradient of the small batch is reduced over the ranks."""
        return self._is_sharded

    def measure_small(self, params: Sequence[nn.Parameter], count: torch.Tensor, scale: float) -> torch.Tensor:
        """Return this rank's values for :meth:`update`, to be summed over all ranks; call it after the small batch.

        Args:
            count: number of losses in the small batch on this rank.
            scale: factor of the loss in the backward pass.
        """
        square = local_squared_norm(params, self._context.device) / scale**2
        if not self._is_sharded:
            square = torch.where(count > 0, square / count.square(), 0.0)
        return torch.stack([square, count, (count > 0).double()])

    def reduce_whole(self, model: nn.Module) -> None:
        """Average the gradients of a replicated model whose only micro-batch ran without a reduction."""
        if isinstance(model, DistributedDataParallel):
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad.div_(dist.get_world_size())

    def update(
        self, small: torch.Tensor, count: torch.Tensor, norm: torch.Tensor, samples: torch.Tensor, skip: torch.Tensor
    ) -> torch.Tensor:
        """Add a measurement and return the noise scale in samples; NaN until it can be estimated.

        Args:
            small: sum of :meth:`measure_small` over all ranks.
            count: number of losses in the global batch.
            norm: norm of its gradient.
            samples: samples in the global batch.
            skip: whether the step is bad and does not count.
        """
        small_square, small_count, ranks = small.unbind()
        if self._is_sharded:
            small_square = small_square * (self._context.layout.gradient_ranks / small_count).square()
            share = small_count / count
        else:
            share = small_count / ranks / count
            small_square = small_square * (self._context.layout.gradient_ranks / ranks)
        big_square = norm.double().square()
        gradient_square = (big_square - share * small_square) / (1 - share)
        variance = (small_square - big_square) / (1 / share - 1)  # for samples in units of the global batch
        measured = torch.stack([variance, gradient_square])
        is_usable = measured.isfinite().all() & ~skip
        self._averages = torch.where(is_usable, DECAY * self._averages + (1 - DECAY) * measured, self._averages)
        variance, gradient_square = self._averages.unbind()
        return torch.where(gradient_square > 0, variance.clamp(min=0) / gradient_square * samples, torch.nan)

    def init_fresh_state(self) -> None:
        self._averages.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self._averages.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages = torch.tensor(state["averages"], dtype=torch.float64, device=self._context.device)

"""One optimizer step under any layout: forward, backward, reduction, clipping, update.

The loss is a sum over what it counts (tokens, samples); the sum of gradients is divided once, by the count over all
ranks and micro-batches, after the reduction and before clipping. So the result depends neither on how the global batch
is cut into micro-batches nor on whether they are equally large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.state_dict import unwrap
from clustertrain.errors import UsageError
from clustertrain.train.core import step_timer
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import (
    Loss,
    StepResult,
    as_sum_and_count,
    call_model,
    index_powers,
    moments,
    pack_sum_count,
    takes_samples,
)
from clustertrain.train.distributed import data_parallel, precision
from clustertrain.train.distributed import grad_norm as gradients
from clustertrain.train.distributed.mesh import Groups
from clustertrain.train.distributed.precision import LossScale
from clustertrain.train.profiling.forward_timer import ForwardTime, waits_for_nobody
from clustertrain.train.stability import clipping, conditional_step
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.stability.conditional_step import RunningStatistics
from clustertrain.train.stability.layer_stats import Layers
from clustertrain.train.stability.step_guard import Guard, Judged


class TrainStep:
    """``forward`` has the time of its forward passes, ``guard`` what is known of the last steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        context: RankContext,
        groups: Groups,
        loss_scale: LossScale | None,
        *,
        decides: bool = True,
        event: Callable[..., None] | None = None,
        frozen: Callable[[], Iterable[nn.Parameter]] = tuple,
    ) -> None:
        """``decides``: False where there are no values to decide by whether the step counts, as in a trace. ``event``
        is told of what ``parallel.compile`` has brought; None: nobody wants to know. ``frozen`` says before each update
        what it leaves alone."""
        self._decides = decides
        # Stages wait for each other inside the passes: one whose compiler fails would leave the others waiting.
        self._event = event if context.parallel.compile and context.layout.pp == 1 else None
        self._model = model
        self.optimizer = optimizer
        self._context = context
        self._groups = groups
        self._scale = loss_scale
        self.guard = Guard(context.stability, context.device)
        self._statistics = RunningStatistics(model)
        self._frozen = frozen
        self._takes_samples = takes_samples(unwrap(model))
        at = context.layout.coordinates(context.rank)
        # Ranks that compute the same loss twice must not count it twice.
        self._counts_loss = at.tp == 0
        self._powers = torch.zeros(0, 3)
        self.forward = ForwardTime(context.device, waits_for_nobody(model, context.layout))

    def __call__(
        self,
        batch: Any,
        samples: Sequence[torch.Tensor] | None,
        loss_fn: Loss,
        clip: Clipping,
        look: Layers | None = None,
    ) -> StepResult:
        """``look``: what is to look at the layers in this step."""
        micro_batches = batch if isinstance(batch, list) else [batch]
        for pair in micro_batches:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise UsageError("train_step: a batch is (inputs, target), or a list of such micro-batches")
        if self._groups.context is not None:
            from clustertrain.train.distributed import context_parallel

            micro_batches = [context_parallel.slice_pair(pair, self._groups.context) for pair in micro_batches]
        nobodys = [bool((p < 0).any()) for p in samples] if samples else [False] * len(micro_batches)
        given = samples if self._takes_samples and samples is not None else [None] * len(micro_batches)
        passes = functools.partial(self._passes, micro_batches, given, nobodys, loss_fn)
        if self._event is not None:
            from clustertrain.train.profiling import compile_trial

            ranks = Ranks(self._groups.checkpoint)
            compile_trial.try_out(self._model, passes, self._context, ranks, self._event)
            self._event = None
        self._statistics.keep()
        with look.hooks() if look is not None else nullcontext():
            totals = passes()
        if not self._counts_loss:
            totals = torch.zeros_like(totals)
        if len(self._powers) != len(totals):
            self._powers = index_powers(self._context.data_rank * len(totals), len(totals), totals.device)
        # Without their places nobody can say which samples a micro-batch holds.
        bad = moments(totals, self._powers) if samples else torch.zeros_like(self._powers[0])
        with step_timer.part("optimizer"):
            return self._update(torch.cat([sum(totals, start=torch.zeros_like(totals[0])), bad]), clip, look)

    @property
    def untried(self) -> bool:
        """Whether the layers are to be compiled, and it is not known yet that they can be."""
        return self._event is not None

    def _passes(
        self, micro_batches: list[Any], samples: Sequence[Any], nobodys: list[bool], loss_fn: Loss
    ) -> torch.Tensor:
        """Forward and backward; leaves the gradients and returns as :meth:`_accumulate`."""
        if self._groups.pipeline() is None:
            return self._accumulate(micro_batches, samples, nobodys, loss_fn)
        with step_timer.part("forward"):  # and backward: the schedule mixes them
            found = self._model.run(micro_batches, samples, nobodys, loss_fn, self._scale_now)  # type: ignore[operator]
        return found  # type: ignore[no-any-return]

    @property
    def _scale_now(self) -> float:
        return self._scale.scale if self._scale is not None else 1.0

    def _accumulate(
        self, micro_batches: list[Any], samples: Sequence[Any], nobodys: list[bool], loss_fn: Loss
    ) -> torch.Tensor:
        """Gradients of the loss's sum, averaged over the ranks; returns of each of this rank's micro-batches the
        (sum of losses, count), (micro-batches, 2) in fp64."""
        totals = []
        defer = self._context.layout.defer_reduction
        with self._loss_context():
            for i, ((inputs, target), places) in enumerate(zip(micro_batches, samples, strict=True)):
                with data_parallel.synchronise(self._model, last=i == len(micro_batches) - 1, defer=defer):
                    self.forward.begin()
                    with step_timer.part("forward"), precision.autocast(self._context):
                        output = call_model(self._model, inputs, places)
                        value, count = as_sum_and_count(loss_fn(output, target), target, nobodys[i])
                    self.forward.end()
                    with step_timer.part("backward"):
                        (value * self._scale_now).backward()  # type: ignore[no-untyped-call]
                value = value.detach()
                totals.append(pack_sum_count(value, count))
        data_parallel.check_all_used(self._model)
        return torch.stack(totals)

    def _update(self, totals: torch.Tensor, clip: Clipping, look: Layers | None) -> StepResult:
        """``totals``: this rank's sum of losses, its count, and :func:`moments`."""
        for p in self._frozen():
            p.grad = None  # so it is in no norm, and gets no state
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        gradients.complete(params)
        elsewhere = getattr(self._model, "counted_elsewhere", ())
        squares = gradients.squares(params, self._context.device, self._context.layout.pp, elsewhere)
        # One sum over all ranks for all figures: what any rank has that is not finite, all hear of.
        figures = torch.cat([totals, squares.reshape(1)])
        if dist.is_initialized():
            dist.all_reduce(figures)
        total, count, *bad, square = figures.unbind()
        # The reduction has averaged over the ranks; the sum is wanted, divided by all that was counted.
        factor = self._context.layout.gradient_ranks / (count * self._scale_now)
        factor = torch.where(count > 0, factor, 0.0)  # on the device: to ask the host would make it wait
        judged = self.guard.judge(total, count, (square.sqrt() * factor).float(), clip)
        overflow = self._scale is not None and self._overflows(self._scale, judged)
        if look is not None:
            look.before_update(factor)
        clipped = clipping.apply(clip, params, factor.float(), judged.norm, judged.limit) & ~judged.skip
        conditional_step.move(self.optimizer, judged.skip if self._decides else None)
        layers = look.after_update() if look is not None else None
        self._statistics.put_back_where(judged.skip)
        self.optimizer.zero_grad()
        self._model.zero_grad()  # also what is in none of its groups, which would add up for ever
        return StepResult(
            judged.loss,
            judged.norm,
            judged.skip,
            clipped,
            self.guard.note_clipped(clipped),
            judged.finite,
            judged.spike,
            (bad[0], bad[1], bad[2]),
            overflow,
            layers,
        )

    @staticmethod
    def _overflows(scale: LossScale, judged: Judged) -> bool:
        """A host sync in each step, and only for fp16: the next step's scale must be known before it begins."""
        if not bool(judged.loss.isfinite() | judged.finite):
            return False  # not for the scale: the loss itself is none, before it was multiplied
        overflow = not bool(judged.finite)
        at_floor = scale.update(overflow=overflow)
        return overflow and not at_floor

    def _loss_context(self) -> AbstractContextManager[object]:
        if self._context.layout.tp == 1:
            return nullcontext()
        from clustertrain.train.distributed import tensor_parallel

        return tensor_parallel.loss_context(self._context)

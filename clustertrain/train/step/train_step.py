"""One optimizer step under any layout: forward, backward, reduction, clipping, update.

The loss is a sum over what it counts (tokens, samples); the sum of gradients is divided once, by the count over all
ranks and micro-batches, after the reduction and before clipping. So the result depends neither on how the global batch
is split into micro-batches nor on whether these are equally large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import unwrap
from clustertrain.errors import UsageError
from clustertrain.plan import checks
from clustertrain.train.core import step_timer
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import (
    Loss,
    StepResult,
    accepts_samples,
    as_sum_and_count,
    call_model,
    compute_nonfinite_moments,
    index_powers,
    pack_sum_count,
)
from clustertrain.train.data.prefetch import DeviceTransfer
from clustertrain.train.distributed import data_parallel, precision
from clustertrain.train.distributed.grad_norm import local_squared_norm, reduce_partial_gradients
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.precision import LossScale
from clustertrain.train.models.contrastive import compares_batch
from clustertrain.train.profiling.forward_timer import ForwardTimer, is_collective_free
from clustertrain.train.stability import clipping, conditional_step
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.stability.conditional_step import RunningStatistics
from clustertrain.train.stability.layer_stats import LayerStats
from clustertrain.train.stability.noise_scale import PACKED_VALUES, NoiseScale
from clustertrain.train.stability.step_guard import StepGuard, StepVerdict
from clustertrain.train.step.whole_batch import WholeBatchPasses


class TrainStep:
    """The training step of a model and its optimizer.

    ``forward_timer`` times the forward passes; ``guard`` decides which steps are skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        context: RankContext,
        groups: ProcessGroups,
        loss_scale: LossScale | None,
        *,
        allow_skip: bool = True,
        emit_event: Callable[..., None] | None = None,
        get_frozen: Callable[[], Iterable[nn.Parameter]] = tuple,
    ) -> None:
        """
        Args:
            allow_skip: False if tensors have no values to base a decision on, as in a trace.
            emit_event: receives the result of the compile trial; None: no trial is run.
            get_frozen: returns the parameters that the next update must not change.
        """
        self._allow_skip = allow_skip
        # Pipeline stages wait for each other during the passes: if one failed to compile, the others would hang.
        self._emit_event = emit_event if context.parallel.compile and context.layout.pp == 1 else None
        self._model = model
        self.optimizer = optimizer
        self._context = context
        self._groups = groups
        self._loss_scale = loss_scale
        self.guard = StepGuard(context.stability, context.device)
        self._noise: NoiseScale | None = None  # in a step that measures it
        self._small_batch = torch.zeros(PACKED_VALUES)
        self._statistics = RunningStatistics(model)
        self._get_frozen = get_frozen
        self._accepts_samples = accepts_samples(unwrap(model))
        self._to_device = DeviceTransfer(context.device)
        coordinates = context.layout.coordinates(context.rank)
        # Tensor-parallel ranks compute the same loss, which must be counted only once.
        self._counts_loss = coordinates.tp == 0
        self._index_powers = torch.zeros(0, 3)
        self.forward_timer = ForwardTimer(context.device, is_collective_free(model, context.layout))
        self._whole_batch_passes = WholeBatchPasses(model, context, self.forward_timer)

    def __call__(
        self,
        batch: Any,
        samples: Sequence[torch.Tensor] | None,
        loss_fn: Loss,
        clip: Clipping,
        layer_stats: LayerStats | None = None,
        noise: NoiseScale | None = None,
    ) -> StepResult:
        """Run one step on ``batch``.

        Args:
            samples: each micro-batch's sample positions in the run; None if unknown.
            layer_stats: collects statistics per layer during this step; None: no statistics.
            noise: measures the gradient noise scale in this step, if the layout and the batch allow it and the samples
                are known; None: no measurement.

        Raises:
            UsageError: ``batch`` is neither a pair nor a list of pairs.
        """
        micro_batches = batch if isinstance(batch, list) else [batch]
        for pair in micro_batches:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise UsageError("train_step: a batch is (inputs, target), or a list of such micro-batches")
        if self._groups.cp_mesh is not None:
            from clustertrain.train.distributed import context_parallel

            micro_batches = [context_parallel.shard_sequence(pair, self._groups.cp_mesh) for pair in micro_batches]
        is_padding = [bool((p < 0).any()) for p in samples] if samples else [False] * len(micro_batches)
        # DDP and fully_shard would copy them while the host waits.
        model_positions = (
            self._to_device(list(samples)) if self._accepts_samples and samples else [None] * len(micro_batches)
        )
        if noise is not None and (samples is None or self.find_noise_problem(len(micro_batches), loss_fn)):
            noise = None
        run_passes = functools.partial(self._forward_backward, micro_batches, model_positions, is_padding, loss_fn)
        if self._emit_event is not None:
            from clustertrain.train.profiling import compile_trial

            ranks = Ranks(self._groups.checkpoint)
            compile_trial.run_compile_trial(self._model, run_passes, self._context, ranks, self._emit_event)
            self._emit_event = None
        self._noise = noise  # after the compile trial, which runs the passes too
        self._statistics.save()
        with layer_stats.hooks() if layer_stats is not None else nullcontext():
            totals = run_passes()
        if not self._counts_loss:
            totals = torch.zeros_like(totals)
        if len(self._index_powers) != len(totals):
            self._index_powers = index_powers(self._context.data_rank * len(totals), len(totals), totals.device)
        # Without positions, the samples of a micro-batch are unknown.
        bad = (
            compute_nonfinite_moments(totals, self._index_powers)
            if samples
            else torch.zeros_like(self._index_powers[0])
        )
        with step_timer.record_part("optimizer"):
            counts = torch.cat([sum(totals, start=torch.zeros_like(totals[0])), bad])
            if noise is not None and samples is not None:
                num_samples = torch.full((1,), sum(int((p >= 0).sum()) for p in samples), device=counts.device)
                counts = torch.cat([counts, self._small_batch, num_samples.double()])
            return self._update(counts, clip, layer_stats)

    def find_noise_problem(self, micro_batches: int, loss_fn: Loss) -> str:
        """Return why the noise scale cannot be measured in a step of ``micro_batches``; empty if it can."""
        return checks.find_noise_problem(
            self._context.layout, self._context.parallel, micro_batches, compares_batch=compares_batch(loss_fn)
        )

    @property
    def is_compile_untried(self) -> bool:
        """Whether the layers will be compiled but the compile trial has not run yet."""
        return self._emit_event is not None

    def _forward_backward(
        self, micro_batches: list[Any], samples: Sequence[torch.Tensor | None], is_padding: list[bool], loss_fn: Loss
    ) -> torch.Tensor:
        """Run the forward and backward passes; return the totals as :meth:`_accumulate` does."""
        if compares_batch(loss_fn):
            totals = self._whole_batch_passes(micro_batches, samples, is_padding, loss_fn, self._current_scale)
            data_parallel.check_no_unused_parameters(self._model)
            return totals
        if self._groups.pp_mesh() is None:
            return self._accumulate(micro_batches, samples, is_padding, loss_fn)
        with step_timer.record_part("forward"):  # and backward: the schedule mixes them
            totals = self._model.run(micro_batches, samples, is_padding, loss_fn, self._current_scale)  # type: ignore[operator]
        return totals  # type: ignore[no-any-return]

    @property
    def _current_scale(self) -> float:
        return self._loss_scale.scale if self._loss_scale is not None else 1.0

    def _accumulate(
        self, micro_batches: list[Any], samples: Sequence[torch.Tensor | None], is_padding: list[bool], loss_fn: Loss
    ) -> torch.Tensor:
        """Accumulate the gradients of the summed loss, averaged over the ranks.

        Returns:
            (sum of losses, count) of each of this rank's micro-batches: (micro-batches, 2) in fp64.
        """
        totals = []
        defer = self._context.layout.defer_reduction
        with self._loss_context():
            for i, ((inputs, target), positions) in enumerate(zip(micro_batches, samples, strict=True)):
                is_small = self._noise is not None and i == 0
                last = self._noise.syncs_small_batch() if is_small and self._noise else i == len(micro_batches) - 1
                with data_parallel.gradient_sync(self._model, last=last, defer=defer):
                    self.forward_timer.begin()
                    with step_timer.record_part("forward"), precision.autocast(self._context):
                        # Without a name for the outputs: it would keep a language model's logits until the next pass.
                        value, count = as_sum_and_count(
                            loss_fn(call_model(self._model, inputs, positions), target), target, is_padding[i]
                        )
                    self.forward_timer.end()
                    with step_timer.record_part("backward"):
                        (value * self._current_scale).backward()  # type: ignore[no-untyped-call]
                value = value.detach()
                totals.append(pack_sum_count(value, count))
                if is_small:
                    self._measure_small_batch(totals[0][1], is_whole=len(micro_batches) == 1)
        data_parallel.check_no_unused_parameters(self._model)
        return torch.stack(totals)

    def _measure_small_batch(self, count: torch.Tensor, *, is_whole: bool) -> None:
        """Measure the gradient of the first micro-batch, the only one if ``is_whole``."""
        assert self._noise is not None
        frozen = {id(p) for p in self._get_frozen()}
        params = [p for p in self._updated_params() if id(p) not in frozen]
        self._small_batch = self._noise.measure_small(params, count, self._current_scale)
        if is_whole:
            data_parallel.check_no_unused_parameters(self._model)  # ranks would reduce different gradients
            self._noise.reduce_whole(self._model)

    def _updated_params(self) -> list[nn.Parameter]:
        return [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]

    def _update(self, totals: torch.Tensor, clip: Clipping, layer_stats: LayerStats | None) -> StepResult:
        """Clip and update.

        Args:
            totals: this rank's loss sum, count and :func:`compute_nonfinite_moments`; with a measurement of the noise
                scale also the values of the small batch and the number of samples.
        """
        for p in self._get_frozen():
            p.grad = None  # keeps it out of the norm and the optimizer state
        params = self._updated_params()
        reduce_partial_gradients(params)
        counted_elsewhere = getattr(self._model, "counted_elsewhere", ())
        local_square = local_squared_norm(params, self._context.device, self._context.layout.pp, counted_elsewhere)
        # One all-reduce for all values: a NaN or Inf on any rank reaches all ranks.
        packed = torch.cat([totals, local_square.reshape(1)])
        if dist.is_initialized():
            dist.all_reduce(packed)
        total, count, *rest, grad_square = packed.unbind()
        moments, small_batch = rest[:3], rest[3:]
        # The reduction averages over the ranks, but the gradient is the sum divided by the global count.
        factor = self._context.layout.gradient_ranks / (count * self._current_scale)
        factor = torch.where(count > 0, factor, 0.0)  # on the device, without a host sync
        verdict = self.guard.check(total, count, (grad_square.sqrt() * factor).float(), clip)
        noise_scale = None
        if self._noise is not None:
            small, samples = torch.stack(small_batch[:-1]), small_batch[-1]
            noise_scale = self._noise.update(small, count, verdict.grad_norm, samples, verdict.skip)
        overflow = self._loss_scale is not None and self._check_overflow(self._loss_scale, verdict)
        if layer_stats is not None:
            layer_stats.before_update(factor)
        clipped = (
            clipping.scale_and_clip(clip, params, factor.float(), verdict.grad_norm, verdict.norm_limit) & ~verdict.skip
        )
        conditional_step.step_unless(self.optimizer, verdict.skip if self._allow_skip else None)
        layer_columns = layer_stats.after_update() if layer_stats is not None else None
        self._statistics.restore_where(verdict.skip)
        self.optimizer.zero_grad()
        self._model.zero_grad()  # also parameters in no group, whose gradients would accumulate
        return StepResult(
            verdict.loss,
            verdict.grad_norm,
            verdict.skip,
            clipped,
            self.guard.record_clipped(clipped),
            verdict.finite,
            verdict.spike,
            (moments[0], moments[1], moments[2]),
            overflow,
            layer_columns,
            noise_scale,
        )

    @staticmethod
    def _check_overflow(scale: LossScale, verdict: StepVerdict) -> bool:
        """Update the fp16 loss scale and return whether this step overflowed.

        This is a host sync per step: the next step needs the new scale before it starts.
        """
        loss_finite, all_finite = torch.stack([verdict.loss.isfinite(), verdict.finite]).tolist()
        if not loss_finite and not all_finite:
            return False  # the unscaled loss is already NaN or Inf, so the scale is not the cause
        overflow = not all_finite
        at_floor = scale.update(overflow=overflow)
        return overflow and not at_floor

    def _loss_context(self) -> AbstractContextManager[object]:
        if self._context.layout.tp == 1:
            return nullcontext()
        from clustertrain.train.distributed import tensor_parallel

        return tensor_parallel.loss_context(self._context)

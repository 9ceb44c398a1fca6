"""Pipeline stages run through a schedule of torch.distributed.pipelining."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from clustertrain.checkpoint.core.state_dict import clean_fqn, is_dtensor
from clustertrain.config.parallel import SINGLE_STAGE_SCHEDULES
from clustertrain.errors import ConfigError, UsageError
from clustertrain.plan.pipeline_schedules import SPLIT_BACKWARD_SCHEDULES, unsupported_reason
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import (
    DOCUMENT_STARTS,
    Loss,
    accepts_document_starts,
    accepts_samples,
    as_sum_and_count,
    pack_sum_count,
)
from clustertrain.train.distributed import pipeline_stages, precision
from clustertrain.train.distributed.pipeline_forward import ForwardOnlyPipeline
from clustertrain.train.distributed.pipeline_stages import StageInfo

_SCHEDULES: dict[str, Any] = {
    "gpipe": torch_pipelining.ScheduleGPipe,
    "1f1b": torch_pipelining.Schedule1F1B,
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zbv": torch_pipelining.ScheduleZBVZeroBubble,
}


def split(model: nn.Module, context: RankContext, mesh: DeviceMesh) -> list[nn.Module]:
    """Return this rank's stages: ``model`` without the units of other stages, so that names stay the same.

    Raises:
        ConfigError: the model cannot be split according to the layout and ``parallel.split``.
    """
    layout, parallel = context.layout, context.parallel
    if parallel.compile and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        raise ConfigError(
            f"parallel.compile with schedule {layout.schedule}: a compiled backward pass cannot be split in two",
            fix="set parallel.schedule = '1f1b' or 'interleaved', or compile = false",
        )
    if layout.activation_checkpointing == "selective" and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        raise ConfigError(
            f"selective activation checkpointing with schedule {layout.schedule}: it returns saved activations once, "
            "and both parts of the backward pass need them",
            fix="set parallel.activation_checkpointing = 'full' or 'none', or parallel.schedule = 'interleaved'",
        )
    return pipeline_stages.split_into_stages(model, layout, parallel.split, mesh.get_local_rank())


class Pipeline(nn.Module):
    """This rank's stages as one module with the names of the whole model; only :meth:`run` trains it."""

    def __init__(
        self, model_parts: list[nn.Module], full_model: nn.Module, context: RankContext, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        self.pipeline_stages = nn.ModuleList(model_parts)
        self._context = context
        self._group = mesh.get_group()
        self._stages = [pipeline_stages.get_stage_info(part) for part in model_parts]
        self.global_fqns = self._stages[0].global_fqns
        self._passes_samples = accepts_samples(full_model)
        # Arguments that every stage takes besides the hidden states.
        self._stage_inputs = (DOCUMENT_STARTS,) if accepts_document_starts(full_model) else ()
        self._shared_params = self._find_shared_params()
        self.counted_elsewhere = frozenset(
            id(p)
            for name, copies in self._shared_params.items()
            for i, p in copies.items()
            if i != self._stages[0].shared[name][0]
        )
        """id() of each parameter that is a copy of one in a lower stage."""
        for model_part, stage in zip(model_parts, self._stages, strict=True):
            model_part.forward = functools.partial(self._forward, model_part, model_part.forward, stage)
            if context.layout.is_fully_sharded and context.layout.schedule in SPLIT_BACKWARD_SCHEDULES:
                # These schedules differentiate inputs and weights separately and look up the weights in the module, so
                # they must still be gathered. The schedule itself gathers and frees whole stages.
                model_part.set_reshard_after_forward(False)  # type: ignore[operator]
        self._initialized_stages: set[int] = set()
        self._skips_shape_inference = False
        self._schedule: Any = None
        self._batch_shape: Any = None
        self._loss: Callable[[Any, int], torch.Tensor]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        # Determines the names of parameters and buffers.
        memo = set() if memo is None else memo
        yield prefix, self
        for model_part in self.pipeline_stages:
            yield from model_part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        for model_part in self.pipeline_stages:
            destination = model_part.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def forward(self, *inputs: Any, samples: torch.Tensor | None = None) -> NoReturn:
        raise UsageError(
            "a model in pipeline stages cannot be called",
            fix="use session.train_step(batch, loss_fn), and session.evaluate(dataset, loss_fn)",
        )

    @functools.cached_property
    def forward_only(self) -> ForwardOnlyPipeline:
        """Forward passes that bypass torch's schedule, whose first pass infers shapes."""
        return ForwardOnlyPipeline(
            self.pipeline_stages, self._stages, self._group, self._context.device, self._stage_inputs
        )

    @contextmanager
    def outside_schedule(self) -> Iterator[None]:
        """Allow passes outside the schedule, which then do not count as its shape-inference pass."""
        self._skips_shape_inference = True
        try:
            yield
        finally:
            self._skips_shape_inference = False

    def run(
        self,
        micro_batches: Sequence[Any],
        samples: Sequence[torch.Tensor | None],
        is_padding: Sequence[bool],
        loss_fn: Loss,
        scale: float,
    ) -> torch.Tensor:
        """Run forward and backward passes of all micro-batches; leave the gradients of ``scale`` times the loss's sum.

        Args:
            micro_batches: (inputs, target) pairs of one shape.
            samples: positions of the samples of each micro-batch, (batch,) int64.
            is_padding: which micro-batches do not count.

        Returns:
            (sum of losses, count) of each micro-batch, (micro-batches, 2) in fp64; zero on ranks without the last
                stage.

        Raises:
            ConfigError: micro-batches have different shapes, or the schedule does not support their number.
        """
        self._check_shapes(micro_batches)
        if self._schedule is None:
            self._schedule = self._build_schedule(len(micro_batches))
        loss_sums: dict[int, torch.Tensor] = {}

        def loss(output: Any, i: int) -> torch.Tensor:
            target = micro_batches[i][1]
            with precision.autocast(self._context):
                value, count = as_sum_and_count(loss_fn(output, target), target, is_padding[i])
            # Stored by number rather than summed, because torch calls this once more to infer shapes.
            loss_sums[i] = pack_sum_count(value.detach(), count)
            return value * scale

        self._loss = loss
        args, kwargs = self._join_inputs([inputs for inputs, _ in micro_batches], samples)
        # Pass targets by index, on the CPU, so that they can have any structure.
        kwargs.update(target=torch.arange(len(micro_batches)), return_outputs=False)
        try:
            with self._loss_context():
                self._schedule.step(*args, **kwargs)
        except RuntimeError as e:
            # torch wraps the failure of a stage; callers need the original exception.
            raise e.__cause__ or e  # noqa: B904
        self._reduce_shared_gradients()
        if not loss_sums:
            return torch.zeros(len(micro_batches), 2, dtype=torch.float64, device=self._context.device)
        return torch.stack([loss_sums[i] for i in sorted(loss_sums)])

    def _join_inputs(
        self, inputs: list[Any], samples: Sequence[torch.Tensor | None]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the whole batch as arguments, which the schedule splits into micro-batches again."""
        args: Sequence[Any] = ()
        kwargs: dict[str, Any] = {}
        if any(stage.index == 0 for stage in self._stages):
            joined = pytree.tree_map(lambda *parts: torch.cat(parts), *inputs)
            if isinstance(joined, dict):
                kwargs.update(joined)
            else:
                args = joined if isinstance(joined, (tuple, list)) else (joined,)
        else:
            names = [name for name in self._stage_inputs if isinstance(inputs[0], dict) and name in inputs[0]]
            kwargs.update({name: torch.cat([part[name] for part in inputs]) for name in names})
        if self._passes_samples and samples[0] is not None:
            kwargs["samples"] = torch.cat([s for s in samples if s is not None])
        return args, kwargs

    def _forward(
        self, model_part: nn.Module, original: Callable[..., Any], stage: StageInfo, *args: Any, **kwargs: Any
    ) -> Any:
        if stage.index > 0:
            kwargs = {k: v for k, v in kwargs.items() if k in ("samples", *self._stage_inputs)}
        # The first pass through a stage is torch's inference of output shapes.
        infers_shapes = stage.index not in self._initialized_stages and not self._skips_shape_inference
        if infers_shapes:
            self._initialized_stages.add(stage.index)
        with precision.autocast(self._context), _preserved_buffers(model_part) if infers_shapes else nullcontext():
            return original(*args, **kwargs)

    def _build_schedule(self, n_micro_batches: int) -> Any:
        layout = self._context.layout
        reason = unsupported_reason(layout, n_micro_batches)
        if reason:
            raise ConfigError(reason, fix="choose another micro_batch or global batch, or parallel.schedule = 'gpipe'")
        stages = [
            torch_pipelining.PipelineStage(
                model_part, stage.index, len(stage.stage_ranks), self._context.device, group=self._group
            )
            for model_part, stage in zip(self.pipeline_stages, self._stages, strict=True)
        ]
        schedule = layout.schedule or ""
        return _SCHEDULES[schedule](
            stages[0] if schedule in SINGLE_STAGE_SCHEDULES else stages,
            n_micro_batches,
            loss_fn=lambda output, number: self._loss(output, int(number)),
            scale_grads=False,
        )

    def _check_shapes(self, micro_batches: Sequence[Any]) -> None:
        """Raise ConfigError if shapes differ from the first micro-batch ever run, which sized the stages' buffers."""
        shapes = [
            pytree.tree_map(lambda t: tuple(t.shape) if isinstance(t, torch.Tensor) else None, tuple(pair))
            for pair in micro_batches
        ]
        batch_shape = (len(shapes), shapes[0])
        self._batch_shape = self._batch_shape or batch_shape
        other = next((s for s in shapes if s != shapes[0]), None)
        if other is not None or batch_shape != self._batch_shape:
            detail = f"{shapes[0]} and {other}" if other else f"{batch_shape} after {self._batch_shape}"
            raise ConfigError(
                f"the micro-batches of a pipeline must all have one shape in all steps: {detail}",
                fix="make the global batch a multiple of micro_batch x data-parallel ranks, and pad sequences to one "
                "length",
            )

    def _loss_context(self) -> Any:
        from clustertrain.train.distributed import tensor_parallel

        return tensor_parallel.loss_context(self._context)

    # -- parameters shared by several stages

    def _find_shared_params(self) -> dict[str, dict[int, nn.Parameter]]:
        """Return this rank's copies of parameters that several stages hold, by name and stage."""
        copies: dict[str, dict[int, nn.Parameter]] = {name: {} for name in self._stages[0].shared}
        for model_part, stage in zip(self.pipeline_stages, self._stages, strict=True):
            for name, p in model_part.named_parameters():
                if clean_fqn(name) in copies:
                    copies[clean_fqn(name)][stage.index] = p
        return copies

    def _reduce_shared_gradients(self) -> None:
        """Give each copy the sum of all copies' gradients, added in the same order so that they stay bitwise equal."""
        for name, copies in self._shared_params.items():
            if not copies:
                continue
            for p in copies.values():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            grads = self._exchange_tensors(
                {i: _local_gradient(p) for i, p in copies.items()}, self._stages[0].shared[name]
            )
            total = sum(grads[1:], start=grads[0])
            for p in copies.values():
                _local_gradient(p).copy_(total)

    def _exchange_tensors(self, local_tensors: dict[int, torch.Tensor], holders: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors of all ``holders`` (stages), in their order."""
        stage_ranks = self._stages[0].stage_ranks
        other_ranks = sorted({stage_ranks[i] for i in holders} - {dist.get_rank(self._group)})
        template = next(iter(local_tensors.values()))
        tensors = {
            i: local_tensors[i].contiguous() if i in local_tensors else torch.empty_like(template) for i in holders
        }
        ops = [self._p2p_op(dist.isend, tensors[i], rank) for i in local_tensors for rank in other_ranks]
        ops += [self._p2p_op(dist.irecv, t, stage_ranks[i]) for i, t in tensors.items() if i not in local_tensors]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return [tensors[i] for i in holders]

    def _p2p_op(self, op: Any, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, dist.get_global_rank(self._group, rank), self._group)


@contextmanager
def _preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers afterwards; inside the block changes (batch-norm statistics) affect copies."""
    originals = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    for m, name, b in originals:
        m._buffers[name] = b.clone()
    try:
        yield
    finally:
        for m, name, b in originals:
            m._buffers[name] = b


def _local_gradient(p: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of the gradient; redistribute it first if it is not placed like the parameter, as tensor
    parallelism may leave it."""
    grad: Any = p.grad
    if not is_dtensor(grad):
        return grad  # type: ignore[no-any-return]
    if grad.placements != p.placements:  # type: ignore[attr-defined]
        p.grad = grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return grad.to_local()  # type: ignore[no-any-return]

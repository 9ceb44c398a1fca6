"""Run the stages of a pipeline through a schedule of torch.distributed.pipelining."""

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

from clustertrain.checkpoint.core.state_dict import clean, is_dtensor
from clustertrain.config.parallel import SINGLE_STAGE_SCHEDULES
from clustertrain.errors import ConfigError, UsageError
from clustertrain.plan import pipeline_schedules as plan
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import Loss, as_sum_and_count, pack_sum_count, takes_samples
from clustertrain.train.distributed import pipeline_stages, precision
from clustertrain.train.distributed.pipeline_forward import ForwardOnly
from clustertrain.train.distributed.pipeline_stages import Stage

_SCHEDULES: dict[str, Any] = {
    "gpipe": torch_pipelining.ScheduleGPipe,
    "1f1b": torch_pipelining.Schedule1F1B,
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zbv": torch_pipelining.ScheduleZBVZeroBubble,
}


def split(model: nn.Module, context: RankContext, mesh: DeviceMesh) -> list[nn.Module]:
    """This rank's stages: ``model`` with the units of other stages taken out, so that what stays keeps its names.

    Raises:
        ConfigError: it cannot be cut as the layout and ``parallel.split`` want.
    """
    layout, parallel = context.layout, context.parallel
    if parallel.compile and layout.schedule in plan.TWO_PART_BACKWARD:
        raise ConfigError(
            f"parallel.compile with schedule {layout.schedule}: a compiled backward cannot be done in two parts",
            fix="use parallel.schedule = '1f1b' or 'interleaved', or compile = false",
        )
    if layout.activation_checkpointing == "selective" and layout.schedule in plan.TWO_PART_BACKWARD:
        raise ConfigError(
            f"selective activation checkpointing with schedule {layout.schedule}: it gives out what it kept once, and "
            "the two parts of the backward pass both ask for it",
            fix="use parallel.activation_checkpointing = 'full' or 'none', or parallel.schedule = 'interleaved'",
        )
    return pipeline_stages.cut(model, layout, parallel.split, mesh.get_local_rank())


class Pipeline(nn.Module):
    """This rank's stages as one module, with the names of the whole model. It is trained by :meth:`run` alone.

    ``counted_elsewhere`` has the id() of each parameter that is a copy of what a lower stage holds too.
    """

    def __init__(self, parts: list[nn.Module], whole: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
        super().__init__()
        self.pipeline_stages = nn.ModuleList(parts)
        self._context = context
        self._group = mesh.get_group()
        self._at = [pipeline_stages.stage_of(part) for part in parts]
        self.whole_names = self._at[0].whole_names
        self._gives_samples = takes_samples(whole)
        self._copies = self._find_copies()
        self.counted_elsewhere = frozenset(
            id(p) for name, held in self._copies.items() for i, p in held.items() if i != self._at[0].shared[name][0]
        )
        for part, at in zip(parts, self._at, strict=True):
            part.forward = functools.partial(self._forward, part, part.forward, at)
            if context.layout.fully_sharded and context.layout.schedule in plan.TWO_PART_BACKWARD:
                # They differentiate a stage's inputs and its weights apart, and look the weights up in the module: they
                # must be the gathered ones of the forward pass. The schedule itself gathers and frees whole stages.
                part.set_reshard_after_forward(False)  # type: ignore[operator]
        self._learned: set[int] = set()
        self._no_learning = False
        self._schedule: Any = None
        self._shape: Any = None
        self._loss: Callable[[Any, int], torch.Tensor]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        # What names of parameters and buffers are made of.
        memo = set() if memo is None else memo
        yield prefix, self
        for part in self.pipeline_stages:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        for part in self.pipeline_stages:
            destination = part.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def forward(self, *inputs: Any, samples: torch.Tensor | None = None) -> NoReturn:
        raise UsageError(
            "a model in pipeline stages cannot be called",
            fix="use session.train_step(batch, loss_fn), and session.evaluate(dataset, loss_fn)",
        )

    @functools.cached_property
    def forward_only(self) -> ForwardOnly:
        """Passes without a schedule of torch's, whose own first pass they leave as it is."""
        return ForwardOnly(self.pipeline_stages, self._at, self._group, self._context.device)

    @contextmanager
    def without_learning(self) -> Iterator[None]:
        """Around passes that are not the schedule's."""
        self._no_learning = True
        try:
            yield
        finally:
            self._no_learning = False

    def run(
        self,
        micro_batches: Sequence[Any],
        samples: Sequence[torch.Tensor | None],
        nobodys: Sequence[bool],
        loss_fn: Loss,
        scale: float,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; leaves the gradients of ``scale`` times the loss's sum.

        Args:
            micro_batches: (inputs, target) pairs of one shape.
            samples: of each micro-batch the places of its samples, (batch,) int64.
            nobodys: which of them count nothing.

        Returns:
            Of each micro-batch the (sum of losses, count), (micro-batches, 2) in fp64, zero where the last stage is
            another rank's.

        Raises:
            ConfigError: micro-batches of several shapes, or a number of them that the schedule cannot take.
        """
        self._check(micro_batches)
        if self._schedule is None:
            self._schedule = self._make_schedule(len(micro_batches))
        counted: dict[int, torch.Tensor] = {}

        def loss(output: Any, i: int) -> torch.Tensor:
            target = micro_batches[i][1]
            with precision.autocast(self._context):
                value, count = as_sum_and_count(loss_fn(output, target), target, nobodys[i])
            # By number and not added up: torch calls it once more to learn the shapes.
            counted[i] = pack_sum_count(value.detach(), count)
            return value * scale

        self._loss = loss
        args, kwargs = self._given([inputs for inputs, _ in micro_batches], samples)
        # A target is told by its number, on the CPU, so that it may be of any structure.
        kwargs.update(target=torch.arange(len(micro_batches)), return_outputs=False)
        try:
            with self._loss_context():
                self._schedule.step(*args, **kwargs)
        except RuntimeError as e:
            # torch tells of a failed stage in words of its own; what becomes of the run hangs on the failure itself.
            raise e.__cause__ or e  # noqa: B904
        self._sum_copies()
        if not counted:
            return torch.zeros(len(micro_batches), 2, dtype=torch.float64, device=self._context.device)
        return torch.stack([counted[i] for i in sorted(counted)])

    def _given(self, inputs: list[Any], samples: Sequence[torch.Tensor | None]) -> tuple[Sequence[Any], dict[str, Any]]:
        """What the schedule is to cut into micro-batches again: it takes the whole batch."""
        args: Sequence[Any] = ()
        kwargs: dict[str, Any] = {}
        if any(at.index == 0 for at in self._at):
            joined = pytree.tree_map(lambda *parts: torch.cat(parts), *inputs)
            if isinstance(joined, dict):
                kwargs.update(joined)
            else:
                args = joined if isinstance(joined, (tuple, list)) else (joined,)
        if self._gives_samples and samples[0] is not None:
            kwargs["samples"] = torch.cat([s for s in samples if s is not None])
        return args, kwargs

    def _forward(self, part: nn.Module, original: Callable[..., Any], at: Stage, *args: Any, **kwargs: Any) -> Any:
        if at.index > 0:
            kwargs = {k: v for k, v in kwargs.items() if k == "samples"}
        # The first pass through a stage is torch's own, to learn the shapes of what it hands on.
        learning = at.index not in self._learned and not self._no_learning
        if learning:
            self._learned.add(at.index)
        with precision.autocast(self._context), _buffers_apart(part) if learning else nullcontext():
            return original(*args, **kwargs)

    def _make_schedule(self, count: int) -> Any:
        layout = self._context.layout
        why = plan.why_not(layout, count)
        if why:
            raise ConfigError(why, fix="choose another micro_batch or global batch, or parallel.schedule = 'gpipe'")
        made = [
            torch_pipelining.PipelineStage(part, at.index, len(at.rank_of), self._context.device, group=self._group)
            for part, at in zip(self.pipeline_stages, self._at, strict=True)
        ]
        schedule = layout.schedule or ""
        return _SCHEDULES[schedule](
            made[0] if schedule in SINGLE_STAGE_SCHEDULES else made,
            count,
            loss_fn=lambda output, number: self._loss(output, int(number)),
            scale_grads=False,
        )

    def _check(self, micro_batches: Sequence[Any]) -> None:
        """The stages' buffers have the shape of the first micro-batch that there was."""
        shapes = [
            pytree.tree_map(lambda t: tuple(t.shape) if isinstance(t, torch.Tensor) else None, tuple(pair))
            for pair in micro_batches
        ]
        step = (len(shapes), shapes[0])
        self._shape = self._shape or step
        other = next((s for s in shapes if s != shapes[0]), None)
        if other is not None or step != self._shape:
            there = f"{shapes[0]} and {other}" if other else f"{step} after {self._shape}"
            raise ConfigError(
                f"the micro-batches of a pipeline must all have one shape, and so in every step: {there}",
                fix="let the global batch divide by micro_batch x data-parallel ranks, and pad sequences to one length",
            )

    def _loss_context(self) -> Any:
        from clustertrain.train.distributed import tensor_parallel

        return tensor_parallel.loss_context(self._context)

    # -- what several stages hold

    def _find_copies(self) -> dict[str, dict[int, nn.Parameter]]:
        """By name and stage this rank's copies of what several stages hold."""
        found: dict[str, dict[int, nn.Parameter]] = {name: {} for name in self._at[0].shared}
        for part, at in zip(self.pipeline_stages, self._at, strict=True):
            for name, p in part.named_parameters():
                if clean(name) in found:
                    found[clean(name)][at.index] = p
        return found

    def _sum_copies(self) -> None:
        """Each copy gets the sum of the gradients of all, added up in the same order: they stay equal in their bits."""
        for name, mine in self._copies.items():
            if not mine:
                continue
            for p in mine.values():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            parts = self._exchange({i: _like_parameter(p) for i, p in mine.items()}, self._at[0].shared[name])
            total = sum(parts[1:], start=parts[0])
            for p in mine.values():
                _like_parameter(p).copy_(total)

    def _exchange(self, mine: dict[int, torch.Tensor], holders: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of all ``holders`` (stages), in their order."""
        rank_of, own = self._at[0].rank_of, dist.get_rank(self._group)
        others = sorted({rank_of[i] for i in holders} - {own})
        some = next(iter(mine.values()))
        found = {i: mine[i].contiguous() if i in mine else torch.empty_like(some) for i in holders}
        ops = [self._op(dist.isend, found[i], rank) for i in mine for rank in others]
        ops += [self._op(dist.irecv, t, rank_of[i]) for i, t in found.items() if i not in mine]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return [found[i] for i in holders]

    def _op(self, what: Any, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(what, tensor, dist.get_global_rank(self._group, rank), self._group)


@contextmanager
def _buffers_apart(module: nn.Module) -> Iterator[None]:
    """What changes buffers (the statistics of a batch norm) changes copies of them."""
    kept = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    for m, name, b in kept:
        m._buffers[name] = b.clone()
    try:
        yield
    finally:
        for m, name, b in kept:
            m._buffers[name] = b


def _like_parameter(p: nn.Parameter) -> torch.Tensor:
    """This rank's part of the gradient, split as the parameter is: tensor parallel may leave it in another way."""
    grad: Any = p.grad
    if not is_dtensor(grad):
        return grad  # type: ignore[no-any-return]
    if grad.placements != p.placements:  # type: ignore[attr-defined]
        p.grad = grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return grad.to_local()  # type: ignore[no-any-return]

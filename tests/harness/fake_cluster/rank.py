"""One rank of a fake job: the trainer's own code under FakeTensorMode, with process groups that communicate nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.optim import ZeroRedundancyOptimizer

from clustertrain.config.job import RunSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.recipe import Recipe
from clustertrain.plan.cost.model_shape import iter_shapes
from clustertrain.plan.cost.optimizer_state import state_bytes
from clustertrain.plan.layout import Batch, Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.parallelize import parallelize
from clustertrain.train.distributed.precision import LossScale, parameter_dtype
from clustertrain.train.models import adapters
from clustertrain.train.models.build import build_model
from clustertrain.train.models.losses import build_loss
from clustertrain.train.optim import build, param_groups, param_info, registry
from clustertrain.train.optim.param_groups import MATRICES
from clustertrain.train.optim.unsharded_update import UnshardedOptimizer
from clustertrain.train.optim.wrapper import OptimizerPair
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.step.train_step import TrainStep
from tests.harness.fake_cluster import stand_ins
from tests.harness.fake_cluster.tracker import Category, PeakTracker

DEVICE = torch.device("cuda", 0)


class Job(Protocol):
    """A job of which one rank is traced."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def batch(self) -> Batch: ...
    @property
    def precision(self) -> str: ...


@dataclass(frozen=True)
class RankTrace:
    """Memory of a rank during one optimizer step, in bytes."""

    peak: int
    at_peak: dict[str, int]
    """By category."""


def trace_rank(job: Job, rank: int) -> RankTrace:
    """Run one optimizer step of ``rank``."""
    trace = trace_or_find_owner(job, rank, follow_owner=False)
    assert isinstance(trace, RankTrace)
    return trace


def trace_or_find_owner(job: Job, rank: int, *, follow_owner: bool = True) -> RankTrace | int:
    """Run one optimizer step of ``rank``, or return the rank that owns more optimizer state than it.

    Args:
        follow_owner: consider the ranks that share the state with ``rank``.
    """
    context = _build_context(job, rank)
    model = build_model(job.recipe.model)
    if job.recipe.adapter.is_enabled:
        adapters.add_adapters(model, job.recipe.adapter, seed=1)
    with (
        stand_ins.open_groups(context) as groups,
        stand_ins.replace_messages(_stage_inputs(job)) as sent,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        trace = _trace(job, model, context, groups, follow_owner)
    if any(message != _stage_inputs(job) for message in sent):
        raise AssertionError(f"a stage sends {sent}, but the next one expects {_stage_inputs(job)}")
    return trace


def _build_context(job: Job, rank: int) -> RankContext:
    return RankContext(
        rank=rank,
        local_rank=0,
        world_size=job.layout.world_size,
        local_world_size=1,
        launched_by_torchrun=job.layout.world_size > 1,
        device=DEVICE,
        layout=job.layout,
        precision=job.precision,  # type: ignore[arg-type]
        run=None,
        attempt=None,
        rank_dir=None,
        spec=RunSpec(recipe=job.recipe),
        batch=job.batch,
    )


def _stage_inputs(job: Job) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of the hidden states that a pipeline stage receives."""
    layout, recipe = job.layout, job.recipe
    length = recipe.data.seq_len // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    # Under autocast the residual stream stays fp32.
    cast = parameter_dtype(job.precision) if layout.is_fully_sharded else None
    return (job.batch.micro_batch, length, recipe.model.dim), cast or torch.float32


def _trace(
    job: Job, model: nn.Module, context: RankContext, groups: ProcessGroups, follow_owner: bool
) -> RankTrace | int:
    recipe, layout = job.recipe, job.layout
    loss_shards = layout.tp if recipe.parallel.loss_parallel else 1
    vocab = recipe.model.vocab_size
    tracker = PeakTracker(DEVICE, {vocab, vocab // loss_shards}, _weight_shapes(recipe.model, layout.tp))
    with tracker, tracker.categories_of_training():
        table = param_info.build_param_table(model)
        model = parallelize(model, context, groups, seed=1)
        tracker.track_parameters(model)
        optimizer = _build_optimizer(recipe, model, table, context, groups)
        scale = LossScale() if job.precision == "fp16" else None
        step = TrainStep(model, optimizer, context, groups, scale, allow_skip=False)
        loss = build_loss(recipe)
        owner = _find_heaviest_owner(optimizer, recipe.optim)
        if owner is not None and owner != context.rank and follow_owner:
            return owner
        _create_state(optimizer)
        tracker.restart()
        with tracker.category(Category.BATCH):
            micro_batches = [_micro_batch(job) for _ in range(traced_micro_batches(job))]
        step(micro_batches, None, loss, Clipping.from_spec(recipe.optim))
    tracker.record_peak()
    return RankTrace(tracker.peak, tracker.at_peak)


def _weight_shapes(model: ModelSpec, tp: int) -> set[tuple[int, ...]]:
    """Return the shapes of the matrices of ``model`` and of their shards, transposed ones included."""
    shapes = {shape for _, shape in iter_shapes(model) if len(shape) > 1}
    shapes |= {(rows // tp, columns) for rows, columns in shapes} | {(rows, columns // tp) for rows, columns in shapes}
    return shapes | {(columns, rows) for rows, columns in shapes}


def _build_optimizer(
    recipe: Recipe, model: nn.Module, table: Any, context: RankContext, groups: ProcessGroups
) -> torch.optim.Optimizer:
    optim = recipe.optim
    param_groups_ = param_groups.parameter_groups(
        model, table, weight_decay=optim.weight_decay, split_hidden=registry.get_entry(optim.name).matrices_only
    )
    options = registry.build_options(optim, is_text=True, device=DEVICE)
    return build.build_optimizer(
        optim.name, param_groups_, options, model=model, param_table=table, context=context, groups=groups
    )


def _find_heaviest_owner(optimizer: torch.optim.Optimizer, optim: OptimSpec) -> int | None:
    """Return the rank that owns the most optimizer state, None if ranks hold the state of their shards."""

    def count(params: Iterable[torch.Tensor]) -> int:
        return sum(state_bytes(optim, p.shape, is_hidden_matrix=hidden.get(id(p), False)) for p in params)

    hidden = {id(p): bool(g.get(MATRICES, True)) for g in optimizer.param_groups for p in g["params"]}
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        loads = [count(p for g in groups for p in g["params"]) for groups in optimizer._partition_parameters()]  # type: ignore[attr-defined]
        return max(range(len(loads)), key=loads.__getitem__)
    inner = [o for o, _ in optimizer._inner] if isinstance(optimizer, OptimizerPair) else [optimizer]
    for unsharded in inner:
        if isinstance(unsharded, UnshardedOptimizer) and unsharded._group is not None:
            owned: list[list[torch.Tensor]] = [[] for _ in range(unsharded._ranks)]
            for p, owner in zip(unsharded._params, unsharded._owners, strict=True):
                owned[owner].append(p)
            loads = list(map(count, owned))
            return dist.get_process_group_ranks(unsharded._group)[max(range(len(loads)), key=loads.__getitem__)]
    return None


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, which exists from the second step on, by an update with gradients of zero."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p in params:
        p.grad = None


def traced_micro_batches(job: Job) -> int:
    """Return how many micro-batches of the step are traced: of those between the first and the last, one."""
    return job.batch.grad_accum if job.layout.pp > 1 else min(job.batch.grad_accum, 3)


def _micro_batch(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(job.batch.micro_batch, job.recipe.data.seq_len + 1, dtype=torch.int64, device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:]

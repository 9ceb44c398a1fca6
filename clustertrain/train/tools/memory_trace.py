"""Memory trace of one training step without allocating memory: torch's MemTracker under FakeTensorMode."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from clustertrain.config.job import RunSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.plan.cost.user_model import MemoryTrace
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.data.streams.source import as_map_style
from clustertrain.train.distributed import block_transforms
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.precision import parameter_dtype
from clustertrain.train.models.build import TrainingTask
from clustertrain.train.optim import registry
from clustertrain.train.optim.param_groups import groups_for_unsharded
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.step.train_step import TrainStep

if TYPE_CHECKING:
    from clustertrain.train.tools.model_stats import TraceRequest

# MemTracker's categories; Other is the batch.
_NON_ACTIVATIONS = ("Parameter", "Buffer", "Gradient", "Optstate", "Other")
CPU = torch.device("cpu")


def trace_step(recipe: Recipe, task: TrainingTask, request: TraceRequest) -> MemoryTrace:
    """Trace the trainer's step in one process with CPU kernels, the only ones on a login node.

    Raises:
        UnsuitableEnvironment: this torch version lacks MemTracker.
        Exception: the model's forward pass failed on fake tensors.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as e:
        raise UnsuitableEnvironment(f"torch {torch.__version__} has no MemTracker: {e}") from e
    dataset = as_map_style(task.dataset)
    samples = [dataset[i % len(dataset)] for i in range(request.micro_batch)]
    # Constants that the model stores outside its buffers remain real tensors.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = tree_map_only(torch.Tensor, fake_mode.from_tensor, default_collate(samples))
    with fake_mode:
        _replace_with_fakes(task.model, parameter_dtype(request.precision) if request.sharded else None)
        context = _single_rank_context(recipe, request)
        block_transforms.apply(task.model, context)
        # Any optimizer works, because the result covers only the time before the update.
        adamw = msgspec.structs.replace(recipe.optim, name="adamw")
        groups = groups_for_unsharded(task.model, recipe.optim.weight_decay)
        optimizer = torch.optim.AdamW(groups, **registry.build_options(adamw, is_text=recipe.is_text, device=CPU))
        tracker = MemTracker()
        tracker.track_external(task.model, *_list_tensors(batch))
        before_update: list[dict[str, int]] = []
        optimizer.register_step_pre_hook(lambda *_: before_update.append(_peak_by_category(tracker)))
        train_step = TrainStep(
            task.model, optimizer, context, ProcessGroups(None, None, None, None), None, allow_skip=False
        )
        with tracker, warnings.catch_warnings():
            # MemTracker's hooks warn after the model has failed, which would hide the cause.
            warnings.simplefilter("ignore")
            train_step([tuple(batch)], None, task.loss, Clipping.from_spec(recipe.optim))
        peak = _peak_by_category(tracker)
    peak_before_update = before_update[0]
    return MemoryTrace(
        micro_batch=request.micro_batch,
        activations_bytes=sum(n for category, n in peak_before_update.items() if category not in _NON_ACTIVATIONS),
        peak_bytes={category.lower(): n for category, n in peak.items()},
    )


def _replace_with_fakes(model: nn.Module, cast: torch.dtype | None) -> None:
    """Replace the tensors of ``model`` with fake ones on CPU, under FakeTensorMode; shared tensors stay shared.

    ``cast`` is the new dtype of floating-point parameters; None keeps theirs. Frozen parameters become buffers, because
    MemTracker (torch 2.13) puts a gradient hook on every parameter, which fails on frozen ones.
    """
    fakes: dict[int, Any] = {}

    def to_fake(t: torch.Tensor) -> Any:
        if id(t) not in fakes:
            is_parameter = isinstance(t, nn.Parameter)
            dtype = cast if cast is not None and is_parameter and t.is_floating_point() else t.dtype
            fake = torch.empty_strided(t.size(), t.stride(), dtype=dtype, device=CPU)
            fakes[id(t)] = nn.Parameter(fake, requires_grad=t.requires_grad) if is_parameter else fake
        return fakes[id(t)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = to_fake(tensor)
        frozen = [name for name, p in module._parameters.items() if p is not None and not p.requires_grad]
        for name in frozen:
            module._buffers[name] = module._parameters.pop(name)


def _single_rank_context(recipe: Recipe, request: TraceRequest) -> RankContext:
    """Return the context of a single rank that computes like the plan's ranks, but uncompiled."""
    parallel = msgspec.structs.replace(recipe.parallel, compile=False)
    return RankContext(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        launched_by_torchrun=False,
        device=CPU,
        layout=Layout(activation_checkpointing=request.activation_checkpointing),
        precision=request.precision,  # type: ignore[arg-type]
        run=None,
        attempt=None,
        rank_dir=None,
        spec=RunSpec(recipe=msgspec.structs.replace(recipe, parallel=parallel)),
        batch=None,
    )


def _list_tensors(batch: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, batch)
    return tensors


def _peak_by_category(tracker: Any) -> dict[str, int]:
    """Return the bytes of each MemTracker category at the peak so far, without the total."""
    cpu_snapshot = tracker.get_tracker_snapshot("peak").get(CPU, {})
    return {category: n for key, n in cpu_snapshot.items() if (category := getattr(key, "value", key)) != "Total"}

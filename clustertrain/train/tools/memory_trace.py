"""One step of a model, traced without memory: torch's MemTracker under FakeTensorMode."""

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
from clustertrain.errors import EnvironmentNotFit
from clustertrain.plan.cost.user_model import Traced
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import block_transforms
from clustertrain.train.distributed.mesh import Groups
from clustertrain.train.distributed.precision import parameter_dtype
from clustertrain.train.models.build import Task
from clustertrain.train.optim import registry
from clustertrain.train.optim.param_groups import groups_of_whole
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.step.train_step import TrainStep

if TYPE_CHECKING:
    from clustertrain.train.tools.model_stats import Step

_STATES = ("Parameter", "Buffer", "Gradient", "Optstate", "Other")  # words of MemTracker; Other: the batch
CPU = torch.device("cpu")


def step(recipe: Recipe, what: Task, asked: Step) -> Traced:
    """The trainer's own step on one process, with the CPU's kernels: a login node has no other device.

    Raises:
        EnvironmentNotFit: this torch lacks what it needs.
        Exception: what the model's forward pass raises, on shapes alone.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as e:
        raise EnvironmentNotFit(f"torch {torch.__version__} has no MemTracker: {e}") from e
    samples = [what.dataset[i % len(what.dataset)] for i in range(asked.micro_batch)]
    # A constant that the model keeps outside of its buffers is a real tensor.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = tree_map_only(torch.Tensor, mode.from_tensor, default_collate(samples))
    with mode:
        _without_memory(what.model, parameter_dtype(asked.precision) if asked.sharded else None)
        context = _alone(recipe, asked)
        block_transforms.apply(what.model, context)
        # Whatever the recipe's optimizer is: what counts here is over before the update.
        adamw = msgspec.structs.replace(recipe.optim, name="adamw")
        groups = groups_of_whole(what.model, recipe.optim.weight_decay)
        optimizer = torch.optim.AdamW(groups, **registry.options(adamw, text=recipe.is_text, device=CPU))
        tracker = MemTracker()
        tracker.track_external(what.model, *_tensors(batch))
        before_update: list[dict[str, int]] = []
        optimizer.register_step_pre_hook(lambda *_: before_update.append(_peak(tracker)))
        do = TrainStep(what.model, optimizer, context, Groups(None, None, None, None), None, decides=False)
        with tracker, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its hooks fail after the model has, and would hide why
            do([tuple(batch)], None, what.loss, Clipping.of(recipe.optim))
        peak = _peak(tracker)
    passes = before_update[0]
    return Traced(
        micro_batch=asked.micro_batch,
        activations_bytes=sum(n for word, n in passes.items() if word not in _STATES),
        peak_bytes={word.lower(): n for word, n in peak.items()},
    )


def _without_memory(model: nn.Module, cast: torch.dtype | None) -> None:
    """Replace, under FakeTensorMode, what ``model`` holds by tensors of the same shapes on the CPU; what is shared
    stays shared. ``cast`` is the type that floating-point parameters get. Parameters that are not trained become
    buffers: MemTracker (torch 2.13) puts a gradient hook on every parameter, which fails on those."""
    made: dict[int, Any] = {}

    def like(t: torch.Tensor) -> Any:
        if id(t) not in made:
            parameter = isinstance(t, nn.Parameter)
            dtype = cast if cast is not None and parameter and t.is_floating_point() else t.dtype
            fake = torch.empty_strided(t.size(), t.stride(), dtype=dtype, device=CPU)
            made[id(t)] = nn.Parameter(fake, requires_grad=t.requires_grad) if parameter else fake
        return made[id(t)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = like(tensor)
        frozen = [name for name, p in module._parameters.items() if p is not None and not p.requires_grad]
        for name in frozen:
            module._buffers[name] = module._parameters.pop(name)


def _alone(recipe: Recipe, asked: Step) -> RankContext:
    """One rank that computes as the plan's do, but for what a compiler would fuse."""
    parallel = msgspec.structs.replace(recipe.parallel, compile=False)
    return RankContext(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        launched=False,
        device=CPU,
        layout=Layout(activation_checkpointing=asked.activation_checkpointing),
        precision=asked.precision,  # type: ignore[arg-type]
        run=None,
        attempt=None,
        rank_dir=None,
        spec=RunSpec(recipe=msgspec.structs.replace(recipe, parallel=parallel)),
        batch=None,
    )


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, batch)
    return found


def _peak(tracker: Any) -> dict[str, int]:
    """Bytes by MemTracker's words at the peak so far, without their sum."""
    of_cpu = tracker.get_tracker_snapshot("peak").get(CPU, {})
    return {word: n for key, n in of_cpu.items() if (word := getattr(key, "value", key)) != "Total"}

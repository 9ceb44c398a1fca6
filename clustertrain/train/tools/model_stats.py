"""``python -m clustertrain.train.tools.model_stats REQUEST``: statistics of a recipe's model as one JSON document.

It is a separate process because it imports torch and the user's code. The model is built on the meta device, where
tensors have shapes but no memory. On request, torch's MemTracker (``torch.distributed._tools.mem_tracker``) traces one
step under FakeTensorMode; both are private APIs, used as they are in torch 2.13.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn

from clustertrain import schema
from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.config.optim import OptimSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ClusterTrainError
from clustertrain.plan.cost.optimizer_state import state_bytes
from clustertrain.plan.cost.user_model import ModelStats, ModuleStats
from clustertrain.train.distributed import pipeline_stages, tensor_parallel
from clustertrain.train.distributed.data_parallel import repeated_layers
from clustertrain.train.distributed.low_bit import FrozenLinear
from clustertrain.train.models import adapters
from clustertrain.train.models.build import build_model, build_task, check_document_attention, find_model_loss
from clustertrain.train.optim import param_info
from clustertrain.train.tools import json_process


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the plan that a trace follows."""

    micro_batch: int
    precision: str
    activation_checkpointing: str
    sharded: bool
    """Whether the layout casts the parameters itself."""


class SplitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How the plan splits the model."""

    tp: int = 1
    """Ranks that share each layer."""
    stages: int = 1
    """Pipeline stages."""


def check_split(model: nn.Module, request: SplitRequest, split: Sequence[str]) -> None:
    """Raise ConfigError if ``model`` does not support the requested split; ``split`` is ``parallel.split``."""
    if request.tp > 1:
        tensor_parallel.check_plan(model, request.tp)
    if request.stages > 1:
        pipeline_stages.find_stage_starts(model, request.stages, split)


def count_model(model: nn.Module, optim: OptimSpec) -> ModelStats:
    """Return the statistics of ``model``.

    Raises:
        ConfigError: a pattern of ``optim`` matches nothing, or ``layer_decay`` is set but depths are unknown.
    """
    param_table = param_info.build_param_table(model)
    param_table.check_layer_decay(optim.layer_decay)
    unfreeze_steps = param_info.find_unfreeze_steps(param_table, ((u.step, u.modules) for u in optim.unfreeze))
    param_info.freeze(model, param_table, optim.freeze, unfreeze_steps)
    for pattern in optim.lr_scale:
        param_table.match_names(pattern, "optim.lr_scale")
    for pattern in optim.weight_decay_scale:
        param_table.match_names(pattern, "optim.weight_decay_scale")
    parameters, buffers = list(model.parameters()), list(model.buffers())
    trained = [p for p in parameters if p.requires_grad]
    dtypes: Counter[str] = Counter()
    for p in parameters:
        dtypes[str(p.dtype).removeprefix("torch.")] += p.numel()
    modules = (
        ModuleStats(name or "the model itself", _count_parameters(m, recurse=False))
        for name, m in model.named_modules()
    )
    return ModelStats(
        parameters=_count_parameters(model),
        parameter_bytes=sum(p.nbytes for p in parameters),
        trainable=sum(p.numel() for p in trained),
        trainable_bytes=sum(p.nbytes for p in trained),
        state_bytes=sum(
            state_bytes(optim, p.shape, is_hidden_matrix=param_table.by_name[clean_fqn(n)].hidden)
            for n, p in model.named_parameters()
            if p.requires_grad
        ),
        buffers=len(buffers),
        buffer_bytes=sum(b.nbytes for b in buffers),
        dtypes=dict(dtypes.most_common()),
        largest=max(modules, key=lambda u: u.parameters),
        units=tuple(ModuleStats(name, _count_parameters(m)) for name, m in repeated_layers(model)),
        built_on="meta" if any(p.is_meta for p in parameters) else "cpu",
        fills_meta=callable(getattr(model, "init_parameter", None)),
    )


def _count_parameters(module: nn.Module, *, recurse: bool = True) -> int:
    """Return the number of parameters; of a matrix in 8 or 4 bits, that of its elements."""
    packed = [m for m in (module.modules() if recurse else (module,)) if isinstance(m, FrozenLinear)]
    elements = sum(math.prod(m.matrix_shape) - m.weight.numel() for m in packed)
    return sum(p.numel() for p in module.parameters(recurse)) + elements


def inspect_model(recipe: Recipe, step: TraceRequest | None, split: SplitRequest) -> ModelStats:
    """Count the model, check that it can be split, and trace it if ``step`` is given.

    A step that cannot be traced is not an error; ``trace_error`` gives the reason.

    Raises:
        ConfigError: the model cannot be built or split.
        Exception: the user's code failed.
    """
    task = build_task(recipe, inspect_only=True) if step is not None else None
    model = task.model if task is not None else build_model(recipe.model, inspect_only=True)
    check_document_attention(recipe, model)
    find_model_loss(recipe, model)  # raises for recipe keys that it does not support
    if recipe.adapter.is_enabled:
        adapters.add_adapters(model, recipe.adapter, recipe.train.seed)
    stats = count_model(model, recipe.optim)
    check_split(model, split, recipe.parallel.split)
    if task is None or step is None:
        return stats
    try:
        from clustertrain.train.tools import memory_trace

        return msgspec.structs.replace(stats, memory_trace=memory_trace.trace_step(recipe, task, step))
    except Exception as e:  # from the user's forward pass, or a limit of torch
        return msgspec.structs.replace(stats, trace_error=f"the trace failed: {_format_error(e)}")


def _format_error(error: BaseException) -> str:
    """Return the message of ``error`` and where it was raised."""
    last_line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{last_line} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else last_line


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"stats": ...}``, or ``{"error", "fix"}`` if the recipe or the user's code is wrong."""
    step = schema.convert(request["step"], TraceRequest) if request["step"] else None
    split = schema.convert(request["split"], SplitRequest)
    recipe = build(request["recipe"], Recipe, "recipe")
    try:
        return {"stats": msgspec.to_builtins(inspect_model(recipe, step, split))}
    except ClusterTrainError as e:
        return {"error": e.message, "fix": e.fix}
    except (Exception, SystemExit) as e:  # the user's module or constructor may raise anything
        return {
            "error": f"model.entry = {recipe.model.entry!r}: {_format_error(e)}",
            "fix": "correct the model's code, which would fail the same way on every rank",
        }


if __name__ == "__main__":
    sys.exit(json_process.run(handle_request))

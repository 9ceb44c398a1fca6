"""``python -m clustertrain.train.tools.model_stats REQUEST``: what a recipe's model is made of, as one JSON document.

A process of its own, because it imports torch and the user's code. The model is built on the meta device, where tensors
have shapes and no memory. On request one step of it is traced by torch's MemTracker
(``torch.distributed._tools.mem_tracker``) under FakeTensorMode, in which operators work on shapes alone; both are
private to torch, here as of 2.13.
"""

from __future__ import annotations

import json
import os
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
from clustertrain.train.models import build as models
from clustertrain.train.optim import param_info as parameters_of


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What of the plan a trace follows. ``sharded``: the layout casts the parameters themselves."""

    micro_batch: int
    precision: str
    activation_checkpointing: str
    sharded: bool


class SplitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How the plan splits the model: ranks that share each layer, and stages of a pipeline."""

    tp: int = 1
    stages: int = 1


def check_split(model: nn.Module, request: SplitRequest, split: Sequence[str]) -> None:
    """Raises ConfigError where ``model`` does not say how it is split like that, or says it wrongly. ``split``: of
    ``parallel.split``."""
    if request.tp > 1:
        tensor_parallel.check_plan(model, request.tp)
    if request.stages > 1:
        pipeline_stages.find_stage_starts(model, request.stages, split)


def count_model(model: nn.Module, optim: OptimSpec) -> ModelStats:
    """Raises ConfigError: a pattern of ``optim`` that fits nothing; rates by a depth that is not known."""
    param_table = parameters_of.build_param_table(model)
    param_table.check_layer_decay(optim.layer_decay)
    unfreeze_steps = parameters_of.find_unfreeze_steps(param_table, ((u.step, u.modules) for u in optim.unfreeze))
    parameters_of.freeze(model, param_table, optim.freeze, unfreeze_steps)
    for pattern in optim.lr_scale:
        param_table.match_names(pattern, "optim.lr_scale")
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
        parameters=sum(p.numel() for p in parameters),
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
    )


def _count_parameters(module: nn.Module, *, recurse: bool = True) -> int:
    return sum(p.numel() for p in module.parameters(recurse))


def inspect_model(recipe: Recipe, step: TraceRequest | None, split: SplitRequest) -> ModelStats:
    """Count the model, check that it can be split, and trace it where ``step`` is given. A step that cannot be traced
    is no error: ``untraced`` says why.

    Raises:
        ConfigError, or whatever the user's code raises: the model cannot be built, or not be split.
    """
    task = models.build_task(recipe, inspect_only=True) if step is not None else None
    model = task.model if task is not None else models.build_model(recipe.model, inspect_only=True)
    models.find_model_loss(recipe, model)  # refuses what does not go with it
    counted = count_model(model, recipe.optim)
    check_split(model, split, recipe.parallel.split)
    if task is None or step is None:
        return counted
    try:
        from clustertrain.train.tools import memory_trace

        return msgspec.structs.replace(counted, traced=memory_trace.trace_step(recipe, task, step))
    except Exception as e:  # of the user's forward pass, or torch's own limits
        return msgspec.structs.replace(counted, untraced=f"the trace failed: {_format_error(e)}")


def _format_error(error: BaseException) -> str:
    """The last line of a traceback, and where it comes from."""
    last_line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{last_line} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else last_line


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """``{"counted": ...}``, or ``{"error", "fix"}`` for what the recipe or the user's code got wrong."""
    step = schema.convert(request["step"], TraceRequest) if request["step"] else None
    split = schema.convert(request["split"], SplitRequest)
    recipe = build(request["recipe"], Recipe, "recipe")
    try:
        return {"counted": msgspec.to_builtins(inspect_model(recipe, step, split))}
    except ClusterTrainError as e:
        return {"error": e.message, "fix": e.fix}
    except (Exception, SystemExit) as e:  # of the user's module or constructor: whatever it is
        return {
            "error": f"model.entry = {recipe.model.entry!r}: {_format_error(e)}",
            "fix": "it would fail so on every rank",
        }


def main() -> int:
    # What the user's code prints must not get between the document and its reader.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(handle_request(json.loads(sys.argv[1]))), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from clustertrain.checkpoint.core.state_dict import clean
from clustertrain.config.optim import OptimSpec
from clustertrain.config.parsing import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ClusterTrainError
from clustertrain.plan.cost.optimizer_state import state_bytes
from clustertrain.plan.cost.user_model import Counted, Unit
from clustertrain.train.distributed import pipeline_stages, tensor_parallel
from clustertrain.train.distributed.data_parallel import units
from clustertrain.train.models import build as models
from clustertrain.train.optim import param_info as parameters_of


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What of the plan a trace follows. ``sharded``: the layout casts the parameters themselves."""

    micro_batch: int
    precision: str
    activation_checkpointing: str
    sharded: bool


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How the plan splits the model: ranks that share each layer, and stages of a pipeline."""

    tp: int = 1
    stages: int = 1


def check_split(model: nn.Module, asked: Split, split: Sequence[str]) -> None:
    """Raises ConfigError where ``model`` does not say how it is split like that, or says it wrongly. ``split``: of
    ``parallel.split``."""
    if asked.tp > 1:
        tensor_parallel.check_plan(model, asked.tp)
    if asked.stages > 1:
        pipeline_stages.where_stages_begin(model, asked.stages, split)


def count(model: nn.Module, optim: OptimSpec) -> Counted:
    """Raises ConfigError: a pattern of ``optim`` that fits nothing; rates by a depth that is not known."""
    known = parameters_of.describe(model)
    known.check_depth(optim.layer_decay)
    thaws = parameters_of.thaws(known, ((u.step, u.modules) for u in optim.unfreeze))
    parameters_of.freeze(model, known, optim.freeze, thaws)
    for pattern in optim.lr_scale:
        known.fitting(pattern, "optim.lr_scale")
    parameters, buffers = list(model.parameters()), list(model.buffers())
    trained = [p for p in parameters if p.requires_grad]
    dtypes: Counter[str] = Counter()
    for p in parameters:
        dtypes[str(p.dtype).removeprefix("torch.")] += p.numel()
    own = (Unit(name or "the model itself", _size(m, recurse=False)) for name, m in model.named_modules())
    return Counted(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.nbytes for p in parameters),
        trainable=sum(p.numel() for p in trained),
        trainable_bytes=sum(p.nbytes for p in trained),
        state_bytes=sum(
            state_bytes(optim, p.shape, hidden=known.by_name[clean(n)].hidden)
            for n, p in model.named_parameters()
            if p.requires_grad
        ),
        buffers=len(buffers),
        buffer_bytes=sum(b.nbytes for b in buffers),
        dtypes=dict(dtypes.most_common()),
        largest=max(own, key=lambda u: u.parameters),
        units=tuple(Unit(name, _size(m)) for name, m in units(model)),
        built_on="meta" if any(p.is_meta for p in parameters) else "cpu",
    )


def _size(module: nn.Module, *, recurse: bool = True) -> int:
    return sum(p.numel() for p in module.parameters(recurse))


def look(recipe: Recipe, step: Step | None, split: Split) -> Counted:
    """Count the model, check that it can be split, and trace it where ``step`` is given. A step that cannot be traced
    is no error: ``untraced`` says why.

    Raises:
        ConfigError, or whatever the user's code raises: the model cannot be built, or not be split.
    """
    what = models.task(recipe, to_look_at=True) if step is not None else None
    model = what.model if what is not None else models.model(recipe.model, to_look_at=True)
    models.own_loss(recipe, model)  # refuses what does not go with it
    found = count(model, recipe.optim)
    check_split(model, split, recipe.parallel.split)
    if what is None or step is None:
        return found
    try:
        from clustertrain.train.tools import memory_trace

        return msgspec.structs.replace(found, traced=memory_trace.step(recipe, what, step))
    except Exception as e:  # of the user's forward pass, or torch's own limits
        return msgspec.structs.replace(found, untraced=f"the trace failed: {_said(e)}")


def _said(error: BaseException) -> str:
    """The last line of a traceback, and where it comes from."""
    last = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{last} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else last


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """``{"counted": ...}``, or ``{"error", "fix"}`` for what the recipe or the user's code got wrong."""
    step = schema.convert(request["step"], Step) if request["step"] else None
    split = schema.convert(request["split"], Split)
    recipe = build(request["recipe"], Recipe, "recipe")
    try:
        return {"counted": msgspec.to_builtins(look(recipe, step, split))}
    except ClusterTrainError as e:
        return {"error": e.message, "fix": e.fix}
    except (Exception, SystemExit) as e:  # of the user's module or constructor: whatever it is
        return {"error": f"model.entry = {recipe.model.entry!r}: {_said(e)}", "fix": "it would fail so on every rank"}


def main() -> int:
    # What the user's code prints must not get between the document and its reader.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(answer(json.loads(sys.argv[1]))), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

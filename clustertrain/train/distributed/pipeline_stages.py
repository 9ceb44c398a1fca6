"""Split of a model into pipeline stages: assignment of units, and removal of other stages' units."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.config.parallel import SINGLE_STAGE_SCHEDULES
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.plan.pipeline_schedules import SPLIT_BACKWARD_SCHEDULES
from clustertrain.train.distributed import low_bit

# Names of modules that stay together; a name in two units is copied to both of their stages.
Unit = tuple[str, ...]

# Cost of an element in a matmul, in units of the cost of one outside, which is small, but not zero. Costs are integers,
# so that equal splits are equal: with floats, rounding would decide which stage gets a spare layer.
MATMUL_COST = 100


@dataclass(frozen=True)
class StageInfo:
    """Position of a pipeline stage."""

    index: int
    stage_ranks: tuple[int, ...]
    """Pipeline rank of each stage."""
    global_fqns: frozenset[str]
    """Keys of the state_dict of the unsplit model."""
    shared: dict[str, tuple[int, ...]]
    """Stages that hold a copy of a parameter, for parameters in several stages."""


def get_stage_info(model_part: nn.Module) -> StageInfo:
    """Return the info that :func:`split_into_stages` attached to a stage."""
    stage = model_part.pipeline_stage
    assert isinstance(stage, StageInfo)
    return stage


def list_units(model: nn.Module) -> list[Unit]:
    """Return the units of ``model`` in execution order.

    Raises:
        ConfigError: the units are undeclared, or do not contain all parameters.
    """
    if hasattr(model, "pipeline_units"):
        units: list[Unit] = [(u,) if isinstance(u, str) else tuple(u) for u in model.pipeline_units]  # type: ignore[union-attr]
    elif isinstance(model, nn.Sequential):
        units = [(name,) for name, _ in model.named_children()]
    else:
        raise ConfigError(
            f"{type(model).__name__} cannot be split into pipeline stages: its units are unknown",
            fix="declare pipeline_units, the names of its parts in execution order, with a forward that skips parts "
            "that are None; or build it as nn.Sequential",
        )
    modules = dict(model.named_modules())
    for name in (n for unit in units for n in unit):
        if name not in modules:
            raise ConfigError(
                f"pipeline_units: {type(model).__name__} has no module {name!r}",
                fix=did_you_mean(name, [n for n in modules if n]),
            )
    for name, _ in model.named_parameters():
        if not any(_is_inside(name, n) for unit in units for n in unit):
            raise ConfigError(f"pipeline_units: parameter {name} is in no unit", fix="add its module to a unit")
    return units


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def estimate_costs(model: nn.Module, model_units: Sequence[Unit]) -> list[int]:
    """Return the cost of each unit: :data:`MATMUL_COST` for each matrix element that an input is multiplied by.

    Attention over a long context costs more than its matrices, but equally so in every layer.
    """
    packed = low_bit.packed_shapes(model)
    tables = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    counted: set[str] = set()
    costs = []
    for unit in model_units:
        cost = 1
        for name, p in model.named_parameters():
            if any(_is_inside(name, n) for n in unit):
                # The first unit with an embedding looks up rows; a second one multiplies by it.
                light = p.dim() < 2 or (name in tables and name not in counted)
                elements = math.prod(packed.get(clean_fqn(name), p.shape))
                cost += elements * (1 if light else MATMUL_COST)
                counted.add(name)
        costs.append(cost)
    return costs


def balance_stages(cost: Sequence[int], stages: int) -> list[int]:
    """Return the first unit of each stage, minimizing the cost of the most expensive stage, then the sum of squares.

    Each stage gets at least one unit. Of equal splits, the one with the spare units in the last stages is returned:
    with 1F1B, these keep the fewest micro-batches.
    """
    cumulative = [0]
    for c in cost:
        cumulative.append(cumulative[-1] + c)

    def best(limit: int | None) -> tuple[int, list[int]]:
        # ends[i]: the best split of the first i units into the stages so far.
        ends: list[tuple[int, list[int]] | None] = [(0, [])] + [None] * len(cost)
        for _ in range(stages):
            ends = [min(_candidate_cuts(ends, cumulative, i, limit), default=None) for i in range(len(cost) + 1)]
        assert ends[-1] is not None
        return ends[-1]

    min_peak_cost, _ = best(None)
    return best(min_peak_cost)[1]


def _candidate_cuts(
    ends: Sequence[tuple[int, list[int]] | None], cumulative: Sequence[int], end: int, limit: int | None
) -> Iterator[tuple[int, list[int]]]:
    """Yield the ways to end a stage before unit ``end``, by maximum cost, or by sum of squares if no stage exceeds
    ``limit``."""
    for first, prefix in enumerate(ends[:end]):
        cost = cumulative[end] - cumulative[first]
        if prefix is None or (limit is not None and cost > limit):
            continue
        value = max(prefix[0], cost) if limit is None else prefix[0] + cost**2
        yield value, [*prefix[1], first]


def parse_split(split: Sequence[str], model_units: Sequence[Unit], stages: int) -> list[int]:
    """Return the first unit of each stage according to ``parallel.split``; raise ConfigError if it is invalid."""
    unit_index = {name: i for i, unit in reversed(list(enumerate(model_units))) for name in unit}
    for name in split:
        if name not in unit_index:
            raise ConfigError(
                f"parallel.split: the model has no unit {name!r}", fix=did_you_mean(name, list(unit_index))
            )
    if len(split) != stages - 1:
        raise ConfigError(
            f"parallel.split names {len(split)} units, but {stages} stages need {stages - 1}",
            fix=f"name {stages - 1} units, or none to split the model evenly",
        )
    starts = [0, *(unit_index[name] for name in split)]
    for previous, current, name in zip(starts, starts[1:], split, strict=False):
        if current <= previous:
            raise ConfigError(
                f"parallel.split = {list(split)}: {name!r} does not come after the first unit of the previous stage",
                fix=f"use the execution order: {', '.join(unit[0] for unit in model_units[1:])}",
            )
    return starts


def find_stage_starts(model: nn.Module, stages: int, split: Sequence[str]) -> list[int]:
    """Return the first unit of each stage, by ``split`` or balanced; raise ConfigError if the model has too few
    units."""
    model_units = list_units(model)
    if len(model_units) < stages:
        raise ConfigError(
            f"{stages} pipeline stages (pp x stages per rank), but only {len(model_units)} units: "
            f"{', '.join(unit[0] for unit in model_units)}",
            fix="use a smaller pp, fewer virtual_stages, or a deeper model",
        )
    return (
        parse_split(split, model_units, stages) if split else balance_stages(estimate_costs(model, model_units), stages)
    )


def assign_stage_ranks(layout: Layout) -> tuple[int, ...]:
    """Return the pipeline rank of each stage: in cyclic order, or for zbv up and back down."""
    ranks = tuple(range(layout.pp))
    if layout.schedule in SINGLE_STAGE_SCHEDULES:
        return ranks
    return ranks + ranks[::-1] if layout.schedule == "zbv" else ranks * layout.virtual_stages


def split_into_stages(model: nn.Module, layout: Layout, split: Sequence[str], rank: int) -> list[nn.Module]:
    """Return the stages of pipeline rank ``rank``, each with a :class:`StageInfo` as ``pipeline_stage``.

    A single stage is ``model`` itself; several are copies.

    Raises:
        ConfigError: the model cannot be split this way.
    """
    model_units, stage_ranks = list_units(model), assign_stage_ranks(layout)
    starts = find_stage_starts(model, len(stage_ranks), split)
    stage_units = [sum(model_units[a:b], ()) for a, b in zip(starts, [*starts[1:], len(model_units)], strict=True)]
    shared = _find_shared_params(model, stage_units)
    _check_frozen_stages(model, stage_units, layout.schedule)
    state_names = frozenset(clean_fqn(k) for k in model.state_dict())
    local_stages = [i for i, r in enumerate(stage_ranks) if r == rank]
    model_parts = [model] if len(local_stages) == 1 else [copy.deepcopy(model) for _ in local_stages]
    for index, model_part in zip(local_stages, model_parts, strict=True):
        for name in dict.fromkeys(n for unit in model_units for n in unit):
            if name not in stage_units[index]:
                _remove_module(model_part, name)
        model_part.pipeline_stage = StageInfo(index, stage_ranks, state_names, shared)  # type: ignore[assignment]
    return model_parts


def _check_frozen_stages(model: nn.Module, stage_units: Sequence[Unit], schedule: str | None) -> None:
    """Refuse schedules that would not train a stage after frozen ones.

    torch 2.13 computes the gradients of weights from those of the stage's input. If only frozen stages precede it, its
    input needs none, and all of its weights get no gradient.
    """
    if schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    trained = [
        i
        for i, unit in enumerate(stage_units)
        if any(p.requires_grad and any(_is_inside(name, n) for n in unit) for name, p in model.named_parameters())
    ]
    if trained and trained[0] > 0:
        raise ConfigError(
            f"schedule {schedule} with frozen pipeline stages: nothing is trained before stage {trained[0]}"
            f" ({', '.join(stage_units[trained[0]])}), whose weights would then get no gradient",
            fix="set parallel.schedule = '1f1b' or 'interleaved', or train something in stage 0",
        )


def _find_shared_params(model: nn.Module, stage_units: Sequence[Unit]) -> dict[str, tuple[int, ...]]:
    """Return the stages of each parameter that several stages hold, by name.

    Raises:
        ConfigError: a stage has no parameters, or one parameter has two names in different stages.
    """
    holders: dict[str, tuple[int, ...]] = {}
    first_names: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        holders[name] = tuple(i for i, unit in enumerate(stage_units) if any(_is_inside(name, n) for n in unit))
        other = first_names.setdefault(id(p), name)
        if holders[other] != holders[name]:
            raise ConfigError(
                f"{other} and {name} are one parameter, and would be in pipeline stages {holders[other]} and "
                f"{holders[name]}",
                fix="use one module in both units, and name it in both entries of pipeline_units",
            )
    for i, unit in enumerate(stage_units):
        if not any(i in stages for stages in holders.values()):
            raise ConfigError(
                f"pipeline stage {i} ({', '.join(unit)}) would have no parameters", fix="use fewer stages"
            )
    return {name: stages for name, stages in holders.items() if len(stages) > 1}


def _remove_module(model: nn.Module, name: str) -> None:
    path, _, last = name.rpartition(".")
    parent = model.get_submodule(path)
    if isinstance(parent, (nn.ModuleDict, nn.ModuleList, nn.Sequential)):
        del parent._modules[last]  # del parent[i] would renumber the rest
    else:
        setattr(parent, last, None)

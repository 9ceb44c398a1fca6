"""Cut a model into pipeline stages: which units go where, and the model with the units of other stages taken out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.config.parallel import SINGLE_STAGE_SCHEDULES
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout

# Modules that stay together, by name; a name in two units is a copy in each of their stages.
Unit = tuple[str, ...]

# What is no matrix product costs memory traffic: little, but not nothing beside a unit that costs nothing at all.
NON_MATMUL_COST = 0.01


@dataclass(frozen=True)
class StageInfo:
    """``stage_ranks`` is the pipeline rank by stage, ``global_fqns`` what the state_dict of the uncut model has,
    ``shared`` the stages that hold a copy of a parameter, where they are several."""

    index: int
    stage_ranks: tuple[int, ...]
    global_fqns: frozenset[str]
    shared: dict[str, tuple[int, ...]]


def get_stage_info(model_part: nn.Module) -> StageInfo:
    """What :func:`split_into_stages` noted of a part."""
    stage = model_part.pipeline_stage
    assert isinstance(stage, StageInfo)
    return stage


def list_units(model: nn.Module) -> list[Unit]:
    """The units of ``model`` in the order of execution.

    Raises:
        ConfigError: they cannot be told, or do not hold all of its parameters.
    """
    if hasattr(model, "pipeline_units"):
        units: list[Unit] = [(u,) if isinstance(u, str) else tuple(u) for u in model.pipeline_units]  # type: ignore[union-attr]
    elif isinstance(model, nn.Sequential):
        units = [(name,) for name, _ in model.named_children()]
    else:
        raise ConfigError(
            f"{type(model).__name__} cannot be cut into pipeline stages: nothing tells its units",
            fix="declare pipeline_units, the names of its parts in the order of execution, with a forward that skips "
            "those that are None; or build it as nn.Sequential",
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
            raise ConfigError(f"pipeline_units: parameter {name} is in no unit", fix="name the module that it is in")
    return units


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def estimate_costs(model: nn.Module, model_units: Sequence[Unit]) -> list[float]:
    """Of each unit, in elements of the matrices that an input is multiplied with. Attention over a long context costs
    more than its matrices tell, but so it does in every layer."""
    tables = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    counted: set[str] = set()
    costs = []
    for unit in model_units:
        cost = NON_MATMUL_COST
        for name, p in model.named_parameters():
            if any(_is_inside(name, n) for n in unit):
                # A table is looked up in at first; a unit that has it once more multiplies with it.
                light = p.dim() < 2 or (name in tables and name not in counted)
                cost += p.numel() * (NON_MATMUL_COST if light else 1.0)
                counted.add(name)
        costs.append(cost)
    return costs


def balance_stages(cost: Sequence[float], stages: int) -> list[int]:
    """Where each stage begins, so that the dearest stage is as cheap as can be, and among such cuts the most even one
    by the sum of squares. Each stage gets at least one unit."""
    cumulative = [0.0]
    for c in cost:
        cumulative.append(cumulative[-1] + c)

    def best(limit: float | None) -> tuple[float, list[int]]:
        # ends[i]: the best cut of the first i units into the stages so far.
        ends: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * len(cost)
        for _ in range(stages):
            ends = [min(_candidate_cuts(ends, cumulative, i, limit), default=None) for i in range(len(cost) + 1)]
        assert ends[-1] is not None
        return ends[-1]

    min_peak_cost, _ = best(None)
    return best(min_peak_cost * (1 + 1e-9))[1]


def _candidate_cuts(
    ends: Sequence[tuple[float, list[int]] | None], cumulative: Sequence[float], end: int, limit: float | None
) -> Iterator[tuple[float, list[int]]]:
    """The ways to let a stage end before unit ``end``: by the dearest stage, or by squares where none passes
    ``limit``."""
    for first, prefix in enumerate(ends[:end]):
        cost = cumulative[end] - cumulative[first]
        if prefix is None or (limit is not None and cost > limit):
            continue
        value = max(prefix[0], cost) if limit is None else prefix[0] + cost**2
        yield value, [*prefix[1], first]


def parse_split(split: Sequence[str], model_units: Sequence[Unit], stages: int) -> list[int]:
    """Where each stage begins, by ``parallel.split``. Raises ConfigError where that cannot be."""
    unit_index = {name: i for i, unit in reversed(list(enumerate(model_units))) for name in unit}
    for name in split:
        if name not in unit_index:
            raise ConfigError(
                f"parallel.split: the model has no unit {name!r}", fix=did_you_mean(name, list(unit_index))
            )
    if len(split) != stages - 1:
        raise ConfigError(
            f"parallel.split names {len(split)} units, and {stages} stages begin at {stages - 1} after the first",
            fix=f"name {stages - 1} units, or none to have the model split evenly",
        )
    starts = [0, *(unit_index[name] for name in split)]
    for previous, current, name in zip(starts, starts[1:], split, strict=False):
        if current <= previous:
            raise ConfigError(
                f"parallel.split = {list(split)}: {name!r} does not come after what begins the stage before it",
                fix=f"in the order of execution: {', '.join(unit[0] for unit in model_units[1:])}",
            )
    return starts


def find_stage_starts(model: nn.Module, stages: int, split: Sequence[str]) -> list[int]:
    """The unit that each of ``stages`` begins with, by ``split`` or balanced. Raises ConfigError where that cannot
    be."""
    model_units = list_units(model)
    if len(model_units) < stages:
        raise ConfigError(
            f"{stages} pipeline stages (pp x those of a rank) and only {len(model_units)} units to put into them: "
            f"{', '.join(unit[0] for unit in model_units)}",
            fix="use a smaller pp, fewer virtual_stages, or a deeper model",
        )
    return (
        parse_split(split, model_units, stages) if split else balance_stages(estimate_costs(model, model_units), stages)
    )


def assign_stage_ranks(layout: Layout) -> tuple[int, ...]:
    """The pipeline rank of each stage: round and round, or for zbv there and back."""
    ranks = tuple(range(layout.pp))
    if layout.schedule in SINGLE_STAGE_SCHEDULES:
        return ranks
    return ranks + ranks[::-1] if layout.schedule == "zbv" else ranks * layout.virtual_stages


def split_into_stages(model: nn.Module, layout: Layout, split: Sequence[str], rank: int) -> list[nn.Module]:
    """The stages of pipeline rank ``rank``, each with a :class:`StageInfo` as its ``pipeline_stage``. One stage is
    ``model`` itself, several are copies.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    model_units, stage_ranks = list_units(model), assign_stage_ranks(layout)
    starts = find_stage_starts(model, len(stage_ranks), split)
    stage_units = [sum(model_units[a:b], ()) for a, b in zip(starts, [*starts[1:], len(model_units)], strict=True)]
    shared = _find_shared_params(model, stage_units)
    state_names = frozenset(clean_fqn(k) for k in model.state_dict())
    own_stages = [i for i, r in enumerate(stage_ranks) if r == rank]
    model_parts = [model] if len(own_stages) == 1 else [copy.deepcopy(model) for _ in own_stages]
    for index, model_part in zip(own_stages, model_parts, strict=True):
        for name in dict.fromkeys(n for unit in model_units for n in unit):
            if name not in stage_units[index]:
                _remove_module(model_part, name)
        model_part.pipeline_stage = StageInfo(index, stage_ranks, state_names, shared)  # type: ignore[assignment]
    return model_parts


def _find_shared_params(model: nn.Module, stage_units: Sequence[Unit]) -> dict[str, tuple[int, ...]]:
    """By parameter name the stages that hold it, for those that several hold.

    Raises:
        ConfigError: a stage without parameters; or one parameter under two names in different stages.
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
                fix="let both units use the one module, and name it in both entries of pipeline_units",
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
        del parent._modules[last]  # del parent[i] would number the rest anew
    else:
        setattr(parent, last, None)

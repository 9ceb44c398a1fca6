"""Cut a model into pipeline stages: which units go where, and the model with the units of other stages taken out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import clean
from clustertrain.config.parallel import SINGLE_STAGE_SCHEDULES
from clustertrain.config.parsing import nearest
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout

# Modules that stay together, by name; a name in two units is a copy in each of their stages.
Unit = tuple[str, ...]

# What is no matrix product costs memory traffic: little, but not nothing beside a unit that costs nothing at all.
LIGHT = 0.01


@dataclass(frozen=True)
class Stage:
    """``rank_of`` is the pipeline rank by stage, ``whole_names`` what the state_dict of the uncut model has, ``shared``
    the stages that hold a copy of a parameter, where they are several."""

    index: int
    rank_of: tuple[int, ...]
    whole_names: frozenset[str]
    shared: dict[str, tuple[int, ...]]


def stage_of(part: nn.Module) -> Stage:
    """What :func:`cut` noted of a part."""
    at = part.pipeline_stage
    assert isinstance(at, Stage)
    return at


def units(model: nn.Module) -> list[Unit]:
    """The units of ``model`` in the order of execution.

    Raises:
        ConfigError: they cannot be told, or do not hold all of its parameters.
    """
    if hasattr(model, "pipeline_units"):
        found: list[Unit] = [(u,) if isinstance(u, str) else tuple(u) for u in model.pipeline_units]  # type: ignore[union-attr]
    elif isinstance(model, nn.Sequential):
        found = [(name,) for name, _ in model.named_children()]
    else:
        raise ConfigError(
            f"{type(model).__name__} cannot be cut into pipeline stages: nothing tells its units",
            fix="declare pipeline_units, the names of its parts in the order of execution, with a forward that skips "
            "those that are None; or build it as nn.Sequential",
        )
    modules = dict(model.named_modules())
    for name in (n for unit in found for n in unit):
        if name not in modules:
            raise ConfigError(
                f"pipeline_units: {type(model).__name__} has no module {name!r}",
                fix=nearest(name, [n for n in modules if n]),
            )
    for name, _ in model.named_parameters():
        if not any(_within(name, n) for unit in found for n in unit):
            raise ConfigError(f"pipeline_units: parameter {name} is in no unit", fix="name the module that it is in")
    return found


def _within(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def costs(model: nn.Module, of: Sequence[Unit]) -> list[float]:
    """Of each unit, in elements of the matrices that an input is multiplied with. Attention over a long context costs
    more than its matrices tell, but so it does in every layer."""
    tables = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    seen: set[str] = set()
    found = []
    for unit in of:
        cost = LIGHT
        for name, p in model.named_parameters():
            if any(_within(name, n) for n in unit):
                # A table is looked up in at first; a unit that has it once more multiplies with it.
                light = p.dim() < 2 or (name in tables and name not in seen)
                cost += p.numel() * (LIGHT if light else 1.0)
                seen.add(name)
        found.append(cost)
    return found


def balanced(cost: Sequence[float], stages: int) -> list[int]:
    """Where each stage begins, so that the dearest stage is as cheap as can be, and among such cuts the most even one
    by the sum of squares. Each stage gets at least one unit."""
    before = [0.0]
    for c in cost:
        before.append(before[-1] + c)

    def best(limit: float | None) -> tuple[float, list[int]]:
        # ends[i]: the best cut of the first i units into the stages so far.
        ends: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * len(cost)
        for _ in range(stages):
            ends = [min(_cuts(ends, before, i, limit), default=None) for i in range(len(cost) + 1)]
        assert ends[-1] is not None
        return ends[-1]

    dearest, _ = best(None)
    return best(dearest * (1 + 1e-9))[1]


def _cuts(
    ends: Sequence[tuple[float, list[int]] | None], before: Sequence[float], end: int, limit: float | None
) -> Iterator[tuple[float, list[int]]]:
    """The ways to let a stage end before unit ``end``: by the dearest stage, or by squares where none passes
    ``limit``."""
    for first, so_far in enumerate(ends[:end]):
        size = before[end] - before[first]
        if so_far is None or (limit is not None and size > limit):
            continue
        value = max(so_far[0], size) if limit is None else so_far[0] + size**2
        yield value, [*so_far[1], first]


def given(split: Sequence[str], of: Sequence[Unit], stages: int) -> list[int]:
    """Where each stage begins, by ``parallel.split``. Raises ConfigError where that cannot be."""
    at = {name: i for i, unit in reversed(list(enumerate(of))) for name in unit}
    for name in split:
        if name not in at:
            raise ConfigError(f"parallel.split: the model has no unit {name!r}", fix=nearest(name, list(at)))
    if len(split) != stages - 1:
        raise ConfigError(
            f"parallel.split names {len(split)} units, and {stages} stages begin at {stages - 1} after the first",
            fix=f"name {stages - 1} units, or none to have the model split evenly",
        )
    begins = [0, *(at[name] for name in split)]
    for before, after, name in zip(begins, begins[1:], split, strict=False):
        if after <= before:
            raise ConfigError(
                f"parallel.split = {list(split)}: {name!r} does not come after what begins the stage before it",
                fix=f"in the order of execution: {', '.join(unit[0] for unit in of[1:])}",
            )
    return begins


def where_stages_begin(model: nn.Module, stages: int, split: Sequence[str]) -> list[int]:
    """The unit that each of ``stages`` begins with, by ``split`` or balanced. Raises ConfigError where that cannot
    be."""
    of = units(model)
    if len(of) < stages:
        raise ConfigError(
            f"{stages} pipeline stages (pp x those of a rank) and only {len(of)} units to put into them: "
            f"{', '.join(unit[0] for unit in of)}",
            fix="use a smaller pp, fewer virtual_stages, or a deeper model",
        )
    return given(split, of, stages) if split else balanced(costs(model, of), stages)


def placement(layout: Layout) -> tuple[int, ...]:
    """The pipeline rank of each stage: round and round, or for zbv there and back."""
    ranks = tuple(range(layout.pp))
    if layout.schedule in SINGLE_STAGE_SCHEDULES:
        return ranks
    return ranks + ranks[::-1] if layout.schedule == "zbv" else ranks * layout.virtual_stages


def cut(model: nn.Module, layout: Layout, split: Sequence[str], rank: int) -> list[nn.Module]:
    """The stages of pipeline rank ``rank``, each with a :class:`Stage` as its ``pipeline_stage``. One stage is
    ``model`` itself, several are copies.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    of, rank_of = units(model), placement(layout)
    first = where_stages_begin(model, len(rank_of), split)
    content = [sum(of[a:b], ()) for a, b in zip(first, [*first[1:], len(of)], strict=True)]
    shared = _shared(model, content)
    names = frozenset(clean(k) for k in model.state_dict())
    mine = [i for i, r in enumerate(rank_of) if r == rank]
    parts = [model] if len(mine) == 1 else [copy.deepcopy(model) for _ in mine]
    for index, part in zip(mine, parts, strict=True):
        for name in dict.fromkeys(n for unit in of for n in unit):
            if name not in content[index]:
                _take_out(part, name)
        part.pipeline_stage = Stage(index, rank_of, names, shared)  # type: ignore[assignment]
    return parts


def _shared(model: nn.Module, content: Sequence[Unit]) -> dict[str, tuple[int, ...]]:
    """By parameter name the stages that hold it, for those that several hold.

    Raises:
        ConfigError: a stage without parameters; or one parameter under two names in different stages.
    """
    holders: dict[str, tuple[int, ...]] = {}
    of_parameter: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        holders[name] = tuple(i for i, unit in enumerate(content) if any(_within(name, n) for n in unit))
        other = of_parameter.setdefault(id(p), name)
        if holders[other] != holders[name]:
            raise ConfigError(
                f"{other} and {name} are one parameter, and would be in pipeline stages {holders[other]} and "
                f"{holders[name]}",
                fix="let both units use the one module, and name it in both entries of pipeline_units",
            )
    for i, unit in enumerate(content):
        if not any(i in stages for stages in holders.values()):
            raise ConfigError(
                f"pipeline stage {i} ({', '.join(unit)}) would have no parameters", fix="use fewer stages"
            )
    return {name: stages for name, stages in holders.items() if len(stages) > 1}


def _take_out(model: nn.Module, name: str) -> None:
    path, _, last = name.rpartition(".")
    parent = model.get_submodule(path)
    if isinstance(parent, (nn.ModuleDict, nn.ModuleList, nn.Sequential)):
        del parent._modules[last]  # del parent[i] would number the rest anew
    else:
        setattr(parent, last, None)

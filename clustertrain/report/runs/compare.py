"""Several runs by one scalar: the shape of ``runs compare --json``. Keys are stable, more may follow."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from clustertrain.config.evaluation import HIGHER_IS_BETTER, PREFIX, SLICE
from clustertrain.config.parsing import nearest
from clustertrain.errors import ClusterTrainError, UsageError
from clustertrain.plan.layout import counted
from clustertrain.run import json_files, metric_curves
from clustertrain.run.metric_curves import Axis, Curve
from clustertrain.run.recipe_hash import recipe_hash
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.run.state import RUNNING
from clustertrain.scheduler.run_status import Look, Unreadable, look_all
from clustertrain.telemetry.analysis.settings_diff import settings_of

MOST = 26  # one letter each
POINTS = 2000  # of a curve in the JSON and on the page


class Value(msgspec.Struct, frozen=True):
    step: int
    value: float


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``final`` and ``best`` are of the metric that decides, ``at_common`` its value at the last step that all
    have; ``missing`` says why there are none. ``gpu_hours`` count the ranks of device cpu."""

    letter: str
    run: str
    state: str
    recipe_hash: str
    own_metric: str  # that its recipe is judged by
    steps: int | None
    steps_per_s: float | None
    tokens: float | None
    gpu_hours: float
    attempts: int
    final: Value | None
    best: Value | None
    at_common: float | None
    missing: str | None
    curves: dict[str, Curve]  # by the scalar's name


class Setting(msgspec.Struct, frozen=True):
    """``values`` in the order of the runs; None where a run does not have it."""

    key: str
    values: list[Any]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``winner`` is the run whose best value is best, None where fewer than two have one or the best two are equal."""

    metric: str
    higher_is_better: bool
    by: Axis
    common_step: int | None
    runs: list[Side]
    winner: str | None
    settings: list[Setting]
    notes: list[str]
    shown: list[str]  # the scalars whose curves are shown


def of_runs(runs: Sequence[RunDir], metrics: Sequence[str] = (), by: Axis = "step") -> Comparison:
    """``metrics``: the first decides; without one the metric of the first run's recipe.

    Raises:
        UsageError: fewer than two different runs, or too many; a scalar that no run has.
        ConfigError, NotReadable: a run's spec does not read.
    """
    if len({run.path for run in runs}) < len(runs) or len(runs) < 2:
        raise UsageError("runs compare: it takes two runs or more, each once")
    if len(runs) > MOST:
        raise UsageError(f"runs compare: {len(runs)} runs, more than {MOST}", fix="compare a part of them")
    recipes = [load_spec(run).recipe for run in runs]
    metric = metrics[0] if metrics else recipes[0].deciding_metric
    shown = list(dict.fromkeys([metric, *metrics]))
    _refuse_unknown(runs, metrics)
    if not metrics and metric != "loss":
        shown.append("loss")
    higher = _higher(metric, [(r.deciding_metric, r.higher_is_better) for r in recipes])
    letters = string.ascii_uppercase[: len(runs)]
    sides = [
        _side(letter, seen, shown, metric, higher, by) for letter, seen in zip(letters, look_all(runs), strict=True)
    ]
    common = min((s.final.step for s in sides if s.final), default=None)
    sides = [
        msgspec.structs.replace(s, at_common=s.curves[metric].at(common) if common is not None else None)
        for s in sides
    ]  # fmt: skip
    settings, unknown = _settings(runs)
    wanted = [name for name in shown if any(s.curves[name].y for s in sides)]
    return Comparison(
        metric=metric,
        higher_is_better=higher,
        by=by,
        common_step=common,
        runs=[msgspec.structs.replace(s, curves={n: thinned(c) for n, c in s.curves.items()}) for s in sides],
        winner=_winner(sides, higher),
        settings=settings,
        notes=[*_conflict(sides, [r.higher_is_better for r in recipes], metric), *_notes(sides, by, wanted), *unknown],
        shown=wanted,
    )


def _refuse_unknown(runs: Sequence[RunDir], metrics: Sequence[str]) -> None:
    known = list(dict.fromkeys(name for run in runs for name in metric_curves.names(run)))
    for name in metrics:
        if name not in known:
            raise UsageError(f"--metric {name}: no run has logged it", fix=nearest(name, known) if known else None)


def _higher(metric: str, of_recipes: Sequence[tuple[str, bool]]) -> bool:
    """As the first recipe says that is judged by it, else by its name."""
    for name, higher in of_recipes:
        if name == metric:
            return higher
    return metric.removeprefix(PREFIX).partition(SLICE)[0] in HIGHER_IS_BETTER


def _side(letter: str, seen: Look | Unreadable, shown: Sequence[str], metric: str, higher: bool, by: Axis) -> Side:
    run, state = seen.run, "unknown" if isinstance(seen, Unreadable) else seen.state
    recipe = load_spec(run).recipe
    found = metric_curves.read(run, list(dict.fromkeys([*shown, "step_s"])))
    drawn = {name: found.curve(name, by) for name in shown}
    judged = found.curve(metric)
    best = judged.best(higher=higher)
    paces = sorted(found.curve("step_s").y)
    tokens = [t for t in found.tokens if math.isfinite(t)]
    world_size = json_files.read(run.plan, {"world_size": float}).value.get("world_size", 0)
    return Side(
        letter=letter,
        run=run.id,
        state=state,
        recipe_hash=recipe_hash(run),
        own_metric=recipe.deciding_metric,
        steps=found.step[-1] if found.step else None,
        steps_per_s=1 / paces[len(paces) // 2] if paces and paces[len(paces) // 2] > 0 else None,
        tokens=tokens[-1] if tokens else None,
        gpu_hours=metric_curves.hours_with_nodes(run, running=state == RUNNING) * int(world_size),
        attempts=len(run.attempts()),
        final=Value(judged.steps[-1], judged.y[-1]) if judged.y else None,
        best=None if best is None else Value(judged.steps[best], judged.y[best]),
        at_common=None,
        missing=None if judged.y else _why(run, metric, bool(found.step)),
        curves=drawn,
    )


def _why(run: RunDir, metric: str, has_rows: bool) -> str:
    if not run.attempts():
        return "has not started yet"
    if not has_rows:
        return "has no rows: no step has ended"
    names = ", ".join(metric_curves.names(run))
    return f"has no {metric} in its rows; they have {names}"


def thinned(curve: Curve) -> Curve:
    """At most ``POINTS`` points, the last one among them."""
    count = len(curve.y)
    if count <= POINTS:
        return curve
    kept = [round(i * (count - 1) / (POINTS - 1)) for i in range(POINTS)]
    return Curve([curve.steps[i] for i in kept], [curve.x[i] for i in kept], [curve.y[i] for i in kept])


def _winner(sides: Sequence[Side], higher: bool) -> str | None:
    values = sorted(((s.best.value, s.run) for s in sides if s.best), reverse=higher)
    if len(values) < 2 or values[0][0] == values[1][0]:
        return None
    return values[0][1]


def _settings(runs: Sequence[RunDir]) -> tuple[list[Setting], list[str]]:
    found, unknown = [], []
    for run in runs:
        try:
            found.append(settings_of(run))
        except (ClusterTrainError, ValueError) as e:
            unknown.append(f"the settings of {run.id} cannot be read: {e}")
    if unknown:
        return [], unknown
    names = dict.fromkeys(name for one in found for name in one)
    rows = [Setting(name, [one.get(name) for one in found]) for name in names]
    return [row for row in rows if any(v != row.values[0] for v in row.values[1:])], []


def _conflict(sides: Sequence[Side], higher: Sequence[bool], metric: str) -> list[str]:
    own = {(s.own_metric, h) for s, h in zip(sides, higher, strict=True)}
    if len(own) < 2:
        return []
    said = ", ".join(
        f"{s.letter} by {s.own_metric} ({'higher' if h else 'lower'} is better)"
        for s, h in zip(sides, higher, strict=True)
    )
    return [f"the recipes are not judged alike: {said}; compared by {metric}"]


def _notes(sides: Sequence[Side], by: Axis, wanted: Sequence[str]) -> list[str]:
    found = [f"{s.letter} {s.missing}" for s in sides if s.missing]
    for name in wanted:
        lost = [s.letter for s in sides if s.steps is not None and not s.missing and not s.curves[name].y]
        if lost:
            what = "tokens in its rows" if by == "tokens" else name
            found.append(f"{', '.join(lost)}: no {what}, and no curve")
    ends = {s.final.step for s in sides if s.final}
    if len(ends) > 1:
        said = ", ".join(f"{s.letter} {counted(s.final.step, 'step')}" for s in sides if s.final)
        found.append(f"the runs are of different length ({said}): see the values at the last step that all have")
    return found

"""Compare several runs by one metric, and the telemetry of two, in the shape of ``clustertrain compare --json``.

Keys of the JSON are stable; more may be added.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from clustertrain.config.evaluation import HIGHER_IS_BETTER, SLICE_SEPARATOR, VALIDATION_PREFIX
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ClusterTrainError, UsageError
from clustertrain.plan.layout import pluralize
from clustertrain.report.runs.settings import PYTHON, load_settings
from clustertrain.run import json_files, metric_curves
from clustertrain.run.metric_curves import Axis, Curve
from clustertrain.run.recipe_hash import load_recipe_hash
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.run.state import RUNNING
from clustertrain.scheduler.run_status import RunStatus, Unreadable, run_statuses
from clustertrain.telemetry.analysis.compare import TelemetryComparison, compare_summaries
from clustertrain.telemetry.analysis.summarize import summarize

MAX_RUNS = 26  # each run is shown as a letter
MAX_POINTS = 2000  # per curve, in the JSON and on the page


class MetricValue(msgspec.Struct, frozen=True):
    """A metric's value at a step."""

    step: int
    """Optimizer steps completed at that point."""
    value: float
    """Value of the metric."""


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the comparison."""

    letter: str
    """Letter by which tables and notes name the run: `A` is the first argument."""
    run: str
    """Id of the run."""
    state: str
    """State of the run, such as `running`; `unknown` if it cannot be read."""
    recipe_hash: str
    """Runs of the same recipe have the same hash."""
    own_metric: str
    """The deciding metric of the run's recipe."""
    steps: int | None
    """Completed optimizer steps; null before the first one."""
    steps_per_s: float | None
    """Optimizer steps per second: the inverse of the median step time; null if no step has a time."""
    tokens: float | None
    """Tokens trained so far, each step once; null for data without tokens."""
    gpu_hours: float
    """Allocated hours times ranks, on CPUs too."""
    attempts: int
    """Number of attempts."""
    final: MetricValue | None
    """The last value of the comparison's metric; null if the run logged none."""
    best: MetricValue | None
    """The best value of the comparison's metric; null if the run logged none."""
    at_common: float | None
    """The metric at the last step that all runs reached; null if the run had logged none by then."""
    missing: str | None
    """Why the run has no value of the metric; null if it has one."""
    curves: dict[str, Curve]
    """Curves by metric name."""


class SettingDiff(msgspec.Struct, frozen=True):
    """A setting that differs between the runs."""

    key: str
    """Dotted name of the setting."""
    values: list[Any]
    """One value per run, in the order of `runs`; null if the run lacks the setting."""


class RunsComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing several runs."""

    metric: str
    """Name of the metric that decides."""
    higher_is_better: bool
    """A higher value of the metric is better."""
    by: Axis
    """The axis of the curves: `step`, `tokens` (trained so far) or `hours` (with nodes, so far)."""
    common_step: int | None
    """The last step that all runs with a value of the metric reached; null if no run has one."""
    runs: list[ComparedRun]
    """The runs, in the order of the arguments."""
    winner: str | None
    """The run with the best value; null if fewer than two runs have a value or the best two are equal."""
    settings: list[SettingDiff]
    """Settings that differ; empty if a run's settings cannot be read."""
    notes: list[str]
    """What limits the comparison, such as runs of different lengths."""
    shown: list[str]
    """The metrics whose curves are shown."""
    telemetry: TelemetryComparison | None
    """Speed, utilization, energy and goodput; null unless two runs are compared and one of them has telemetry."""


def compare_runs(
    runs: Sequence[RunDir], metrics: Sequence[str] = (), by: Axis = "step", *, with_telemetry: bool = True
) -> RunsComparison:
    """Compare runs by the first of ``metrics``, by default the deciding metric of the first run's recipe.

    The telemetry of two long runs takes seconds to read.

    Raises:
        UsageError: fewer than two different runs, too many runs, or a metric that no run logged.
        ConfigError, PermissionDenied: a run's spec cannot be read.
    """
    if len({run.path for run in runs}) < len(runs) or len(runs) < 2:
        raise UsageError("compare: needs two or more different runs", fix="clustertrain compare RUN RUN")
    if len(runs) > MAX_RUNS:
        raise UsageError(f"compare: {len(runs)} runs, more than {MAX_RUNS}", fix="compare fewer runs")
    recipes = [load_spec(run).recipe for run in runs]
    metric = metrics[0] if metrics else recipes[0].deciding_metric
    scalars = list(dict.fromkeys([metric, *metrics]))
    _check_metrics(runs, metrics)
    if not metrics and metric != "loss":
        scalars.append("loss")
    higher_is_better = _is_higher_better(metric, [(r.deciding_metric, r.higher_is_better) for r in recipes])
    letters = string.ascii_uppercase[: len(runs)]
    compared = [
        _compared_run(letter, run_status, scalars, metric, higher_is_better, by)
        for letter, run_status in zip(letters, run_statuses(runs), strict=True)
    ]
    common_step = min((s.final.step for s in compared if s.final), default=None)
    compared = [
        msgspec.structs.replace(s,
            at_common=s.curves[metric].value_at(common_step) if common_step is not None else None)
        for s in compared
    ]  # fmt: skip
    settings, unreadable = _setting_diffs(runs)
    shown_scalars = [name for name in scalars if any(s.curves[name].y for s in compared)]
    return RunsComparison(
        metric=metric,
        higher_is_better=higher_is_better,
        by=by,
        common_step=common_step,
        runs=[msgspec.structs.replace(s, curves={n: decimate(c) for n, c in s.curves.items()}) for s in compared],
        winner=_winner(compared, higher_is_better),
        settings=settings,
        notes=[
            *_metric_conflict_notes(compared, [r.higher_is_better for r in recipes], metric),
            *_notes(compared, by, shown_scalars),
            *unreadable,
        ],
        shown=shown_scalars,
        telemetry=_compare_telemetry(runs) if with_telemetry else None,
    )


def _compare_telemetry(runs: Sequence[RunDir]) -> TelemetryComparison | None:
    if len(runs) != 2:
        return None
    a, b = map(summarize, runs)
    has_data = any(s.training or any(host.samples for host in s.hosts) for s in (a, b))
    return compare_summaries(a, b) if has_data else None


def _check_metrics(runs: Sequence[RunDir], metrics: Sequence[str]) -> None:
    known = list(dict.fromkeys(name for run in runs for name in metric_curves.list_scalars(run)))
    for name in metrics:
        if name not in known:
            raise UsageError(f"--metric {name}: no run logged it", fix=did_you_mean(name, known) if known else None)


def _is_higher_better(metric: str, recipe_metrics: Sequence[tuple[str, bool]]) -> bool:
    """Return the direction from the first recipe whose deciding metric this is, else from the metric's name."""
    for name, higher_is_better in recipe_metrics:
        if name == metric:
            return higher_is_better
    return metric.removeprefix(VALIDATION_PREFIX).partition(SLICE_SEPARATOR)[0] in HIGHER_IS_BETTER


def _compared_run(
    letter: str,
    run_status: RunStatus | Unreadable,
    scalars: Sequence[str],
    metric: str,
    higher_is_better: bool,
    by: Axis,
) -> ComparedRun:
    run, state = run_status.run, "unknown" if isinstance(run_status, Unreadable) else run_status.state
    recipe = load_spec(run).recipe
    curves = metric_curves.load_step_table(run, list(dict.fromkeys([*scalars, "step_s"])))
    shown_curves = {name: curves.curve(name, by) for name in scalars}
    deciding_curve = curves.curve(metric)
    best = deciding_curve.best_index(higher=higher_is_better)
    step_times = sorted(curves.curve("step_s").y)
    tokens = [t for t in curves.tokens if math.isfinite(t)]
    world_size = json_files.load_document(run.plan, {"world_size": float}).value.get("world_size", 0)
    return ComparedRun(
        letter=letter,
        run=run.id,
        state=state,
        recipe_hash=load_recipe_hash(run),
        own_metric=recipe.deciding_metric,
        steps=curves.step[-1] if curves.step else None,
        steps_per_s=(
            1 / step_times[len(step_times) // 2] if step_times and step_times[len(step_times) // 2] > 0 else None
        ),
        tokens=tokens[-1] if tokens else None,
        gpu_hours=metric_curves.compute_allocated_hours(run, is_running=state == RUNNING) * int(world_size),
        attempts=len(run.attempts()),
        final=MetricValue(deciding_curve.steps[-1], deciding_curve.y[-1]) if deciding_curve.y else None,
        best=None if best is None else MetricValue(deciding_curve.steps[best], deciding_curve.y[best]),
        at_common=None,
        missing=None if deciding_curve.y else _missing_reason(run, metric, bool(curves.step)),
        curves=shown_curves,
    )


def _missing_reason(run: RunDir, metric: str, has_rows: bool) -> str:
    if not run.attempts():
        return "has not started yet"
    if not has_rows:
        return "has no metrics: no step has completed"
    names = ", ".join(metric_curves.list_scalars(run))
    return f"did not log {metric}; it logged {names}"


def decimate(curve: Curve) -> Curve:
    """Return at most ``MAX_POINTS`` evenly spaced points of the curve, including the last one."""
    count = len(curve.y)
    if count <= MAX_POINTS:
        return curve
    indices = [round(i * (count - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)]
    return Curve([curve.steps[i] for i in indices], [curve.x[i] for i in indices], [curve.y[i] for i in indices])


def _winner(compared: Sequence[ComparedRun], higher_is_better: bool) -> str | None:
    values = sorted(((s.best.value, s.run) for s in compared if s.best), reverse=higher_is_better)
    if len(values) < 2 or values[0][0] == values[1][0]:
        return None
    return values[0][1]


def _setting_diffs(runs: Sequence[RunDir]) -> tuple[list[SettingDiff], list[str]]:
    settings, unreadable = [], []
    for run in runs:
        try:
            settings.append(load_settings(run))
        except (ClusterTrainError, ValueError) as e:
            unreadable.append(f"the settings of {run.id} cannot be read: {e}")
    if unreadable:
        return [], unreadable
    names = dict.fromkeys(name for run_settings in settings for name in run_settings)
    if not all(any(name.startswith(f"{PYTHON}.") for name in run_settings) for run_settings in settings):
        # A run that has not started has no package record, so every package would seem to differ.
        names = dict.fromkeys(name for name in names if not name.startswith(f"{PYTHON}."))
    rows = [SettingDiff(name, [run_settings.get(name) for run_settings in settings]) for name in names]
    return [row for row in rows if any(v != row.values[0] for v in row.values[1:])], []


def _metric_conflict_notes(compared: Sequence[ComparedRun], higher_is_better: Sequence[bool], metric: str) -> list[str]:
    criteria = {(s.own_metric, h) for s, h in zip(compared, higher_is_better, strict=True)}
    if len(criteria) < 2:
        return []
    criteria_text = ", ".join(
        f"{s.letter} by {s.own_metric} ({'higher' if h else 'lower'} is better)"
        for s, h in zip(compared, higher_is_better, strict=True)
    )
    return [f"the recipes have different deciding metrics: {criteria_text}; compared by {metric}"]


def _notes(compared: Sequence[ComparedRun], by: Axis, scalars: Sequence[str]) -> list[str]:
    notes = [f"{s.letter} {s.missing}" for s in compared if s.missing]
    for name in scalars:
        without_curve = [s.letter for s in compared if s.steps is not None and not s.missing and not s.curves[name].y]
        if without_curve:
            missing_data = "tokens" if by == "tokens" else name
            notes.append(f"{', '.join(without_curve)}: logged no {missing_data}, so there is no curve")
    last_steps = {s.final.step for s in compared if s.final}
    if len(last_steps) > 1:
        lengths_text = ", ".join(f"{s.letter} {pluralize(s.final.step, 'step')}" for s in compared if s.final)
        notes.append(f"the runs have different lengths ({lengths_text}): compare the values at the last common step")
    return notes

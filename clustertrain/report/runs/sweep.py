"""The results of a sweep, during and after it: the shape of ``sweep show --json`` and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.text import Text

from clustertrain import reading
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ClusterTrainError
from clustertrain.report import status
from clustertrain.report.runs.compare import MetricValue
from clustertrain.report.runs.compare_text import format_setting
from clustertrain.report.tables import Column, fit_table
from clustertrain.report.terminal import Glyphs
from clustertrain.run import json_files, metric_curves, state
from clustertrain.run.lookup import list_sweep_runs
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.run_status import RunStatus, Unreadable, run_statuses

FINAL_STATES = state.FINAL


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the sweep. Of a run that cannot be read, job and steps are null."""

    task: int
    """Number of the run in the sweep, from 0; -1 if the folder of the sweep has no link to it."""
    run: str
    """Id of the run."""
    job_id: str | None
    """Its newest job; null if it has none."""
    values: dict[str, Any]
    """The values of this run, by dotted key of the recipe."""
    state: str
    """State of the run, such as `running`; `unknown` if it cannot be read."""
    attempts: int
    """All starts, including requeues and resubmissions."""
    step: int | None
    """Completed optimizer steps; null before the first one."""
    total_steps: int | None
    """Optimizer steps to complete; null for a script that has not said it."""
    best: MetricValue | None = None
    """The best value of the deciding metric; null if the run logged none."""
    last: MetricValue | None = None
    """The last value of the deciding metric; null if the run logged none."""
    error: str | None = None
    """Why the run cannot be read; null if it can."""


class SweepResults(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a sweep."""

    sweep: str
    """Id of the sweep."""
    metric: str
    """Name of the deciding metric."""
    higher_is_better: bool
    """A higher value of the metric is better."""
    runs: list[SweepRow]
    """The runs, best first."""
    best: str | None
    """The best run; null if no run has a value."""
    deleted: int
    """The number of deleted runs."""
    notes: list[str]
    """What limits the comparison, such as recipes with another deciding metric."""

    @property
    def is_final(self) -> bool:
        return all(row.state in FINAL_STATES or row.error for row in self.runs)


class SweepReader:
    """Reads a sweep repeatedly; metric files that have not changed are not read again."""

    def __init__(self, sweep_dir: Path) -> None:
        self._sweep_dir = sweep_dir
        self._cached_values: dict[str, tuple[tuple[int, ...], tuple[MetricValue | None, MetricValue | None]]] = {}

    def read(self, known: Mapping[str, RunStatus | Unreadable] = MappingProxyType({})) -> SweepResults:
        """Return the current results. ``known`` has statuses by run id, which are not asked for again.

        Raises:
            ConfigError, PermissionDenied: no run's spec can be read.
        """
        runs = list_sweep_runs(self._sweep_dir)
        recipes = _load_recipes(runs)
        first_recipe = next(iter(recipes.values()), Recipe())
        metric, higher_is_better = first_recipe.deciding_metric, first_recipe.higher_is_better
        rows = [
            self._row(run, run_status, metric, higher_is_better)
            for run, run_status in zip(runs, _complete_statuses(runs, known), strict=True)
        ]
        worst = -float("inf") if higher_is_better else float("inf")
        rows.sort(
            key=lambda r: (
                r.best is None, (-1 if higher_is_better else 1) * (r.best.value if r.best else worst), r.task)
        )  # fmt: skip
        other_metrics = sorted({r.deciding_metric for r in recipes.values()} - {metric})
        other_text = f"the deciding metric of some recipes is {', '.join(other_metrics)}; shown is {metric}"
        notes = [other_text] if other_metrics else []
        return SweepResults(
            sweep=self._sweep_dir.name,
            metric=metric,
            higher_is_better=higher_is_better,
            runs=rows,
            best=rows[0].run if rows and rows[0].best else None,
            deleted=sum(1 for p in self._sweep_dir.iterdir() if reading.is_unsigned_int(p.name)) - len(runs),
            notes=notes,
        )

    def _row(self, run: RunDir, run_status: RunStatus | Unreadable, metric: str, higher_is_better: bool) -> SweepRow:
        sweep_record = _read_sweep_record(run)
        recorded, task = sweep_record.get("values"), self._find_task(run)
        values = recorded if isinstance(recorded, dict) else {}
        if isinstance(run_status, Unreadable):
            return SweepRow(
                task=task, run=run.id, job_id=None, values=values, state="unknown", attempts=0, step=None,
                total_steps=None, error=run_status.error,
            )  # fmt: skip
        best, last = self._best_and_last(run, metric, higher_is_better)
        return SweepRow(
            task=task,
            run=run.id,
            job_id=run_status.job_id,
            values=values,
            state=run_status.state,
            attempts=len(run_status.history),
            step=run_status.step,
            total_steps=run_status.total_steps,
            best=best,
            last=last,
        )

    def _find_task(self, run: RunDir) -> int:
        links = (p for p in self._sweep_dir.iterdir() if reading.is_unsigned_int(p.name))
        return next((int(p.name) for p in links if p.resolve().name == run.id), -1)

    def _best_and_last(
        self, run: RunDir, metric: str, higher_is_better: bool
    ) -> tuple[MetricValue | None, MetricValue | None]:
        files = [path for a in run.attempts() for path in run.metrics_files(a.n)]
        sizes = tuple(path.stat().st_size if path.exists() else 0 for path in files)
        cached = self._cached_values.get(run.id)
        if cached is None or cached[0] != sizes:
            cached = (sizes, _read_best_and_last(run, metric, higher_is_better))
            self._cached_values[run.id] = cached
        return cached[1]


def _complete_statuses(
    runs: Sequence[RunDir], known: Mapping[str, RunStatus | Unreadable]
) -> list[RunStatus | Unreadable]:
    unknown = [run for run in runs if run.id not in known]
    found = {status.run.id: status for status in run_statuses(unknown)} if unknown else {}
    return [known.get(run.id) or found[run.id] for run in runs]


def _read_best_and_last(
    run: RunDir, metric: str, higher_is_better: bool
) -> tuple[MetricValue | None, MetricValue | None]:
    curve = metric_curves.load_step_table(run, [metric]).curve(metric)
    best = curve.best_index(higher=higher_is_better)
    if best is None:
        return None, None
    return MetricValue(curve.steps[best], curve.y[best]), MetricValue(curve.steps[-1], curve.y[-1])


def _read_sweep_record(run: RunDir) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json_files.load_document(run.record, {"sweep": dict}).value.get("sweep", {})
    except PermissionError:
        return {}
    return record


def _load_recipes(runs: Sequence[RunDir]) -> dict[str, Recipe]:
    """Return the recipes that can be read by run id; raise the first error if none can."""
    recipes: dict[str, Recipe] = {}
    first_error: ClusterTrainError | None = None
    for run in runs:
        try:
            recipes[run.id] = load_spec(run).recipe
        except ClusterTrainError as e:
            first_error = first_error or e
    if first_error is not None and not recipes:
        raise first_error
    return recipes


def render(results: SweepResults, width: int, signs: Glyphs) -> list[RenderableType]:
    """Render the results as a table with one row per run."""
    num_ended = sum(1 for row in results.runs if row.state in FINAL_STATES)
    rule = f"{results.metric}, {'higher' if results.higher_is_better else 'lower'} is better"
    header = Text.assemble((results.sweep, "bold"), f"  {num_ended} of {len(results.runs)} runs have ended; by {rule}")
    keys = list(dict.fromkeys(key for row in results.runs for key in row.values))
    titles = ("", *keys, "best", "at step", "last", "step", "state", "starts", "run")
    cells = zip(*(_cells(row, keys, results.best, signs) for row in results.runs), strict=True)
    columns = [Column(title, column, title not in _LEFT_ALIGNED) for title, column in zip(titles, cells, strict=True)]
    lines: list[RenderableType] = [
        header,
        "",
        fit_table(columns, width, drop_order=("last", "starts", "step", "at step")),
    ]
    lines += [Text(f"{row.run}: {row.error}") for row in results.runs if row.error]
    lines += [Text(f"note: {note}") for note in results.notes]
    return lines + ([Text(f"note: {results.deleted} runs of the sweep were deleted")] if results.deleted else [])


_LEFT_ALIGNED = ("", "state", "run")


def _cells(row: SweepRow, keys: Sequence[str], best: str | None, signs: Glyphs) -> list[str | Text]:
    def format_value(value: MetricValue | None) -> str:
        return signs.dash if value is None else f"{value.value:.5g}"

    style = "bold green" if row.run == best else ""
    step_text = (
        signs.dash if row.step is None else f"{row.step}/{row.total_steps}" if row.total_steps else str(row.step)
    )
    return [
        Text("*" if row.run == best else "", style),
        *(Text(_format_value(row.values.get(key), signs), style) for key in keys),
        Text(format_value(row.best), style),
        signs.dash if row.best is None else str(row.best.step),
        format_value(row.last),
        step_text,
        status.styled_state(row.state),
        str(row.attempts),
        Text(row.run, style),
    ]


def _format_value(value: Any, signs: Glyphs) -> str:
    return f"{value:.6g}" if isinstance(value, float) else format_setting(value, signs.dash)

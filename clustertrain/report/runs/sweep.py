"""The results of a sweep, while it runs and afterwards: the shape of ``sweep show --json``, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.text import Text

from clustertrain import reading
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ClusterTrainError
from clustertrain.report import status
from clustertrain.report.runs.compare import Value
from clustertrain.report.runs.compare_text import said
from clustertrain.report.tables import Column, fitted
from clustertrain.report.terminal import Glyphs
from clustertrain.run import json_files, metric_curves, state
from clustertrain.run.lookup import sweep_runs
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.run_status import Look, Unreadable, look_all

FINAL = state.FINAL


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``attempts`` are all its starts, requeues and resubmissions among them; ``best`` and ``last`` are of the
    metric that decides."""

    task: int
    run: str
    job_id: str | None
    set: dict[str, Any]
    state: str
    attempts: int
    step: int | None
    total_steps: int | None
    best: Value | None = None
    last: Value | None = None
    error: str | None = None  # why the run does not read


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """``runs`` with the best one first; ``gone`` is how many of them were deleted. ``best`` is None where no run has a
    value."""

    sweep: str
    metric: str
    higher_is_better: bool
    runs: list[Row]
    best: str | None
    gone: int
    notes: list[str]

    @property
    def final(self) -> bool:
        return all(row.state in FINAL or row.error for row in self.runs)


class Reader:
    """Reads a sweep again and again: the rows of a run that has ended only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._values: dict[str, tuple[tuple[int, ...], tuple[Value | None, Value | None]]] = {}

    def read(self) -> Sweep:
        """Raises ConfigError, NotReadable: no run's spec reads."""
        runs = sweep_runs(self._folder)
        recipes = _recipes(runs)
        first = next(iter(recipes.values()), Recipe())
        metric, higher = first.deciding_metric, first.higher_is_better
        rows = [self._row(run, seen, metric, higher) for run, seen in zip(runs, look_all(runs), strict=True)]
        worst = -float("inf") if higher else float("inf")
        rows.sort(
            key=lambda r: (r.best is None, (-1 if higher else 1) * (r.best.value if r.best else worst), r.task)
        )  # fmt: skip
        others = sorted({r.deciding_metric for r in recipes.values()} - {metric})
        notes = [f"some recipes are judged by {', '.join(others)}; shown is {metric}"] if others else []
        return Sweep(
            sweep=self._folder.name,
            metric=metric,
            higher_is_better=higher,
            runs=rows,
            best=rows[0].run if rows and rows[0].best else None,
            gone=sum(1 for p in self._folder.iterdir() if reading.is_count(p.name)) - len(runs),
            notes=notes,
        )

    def _row(self, run: RunDir, seen: Look | Unreadable, metric: str, higher: bool) -> Row:
        made = _made(run)
        values, task = made.get("set"), self._task(run)
        set_ = values if isinstance(values, dict) else {}
        if isinstance(seen, Unreadable):
            return Row(
                task=task, run=run.id, job_id=None, set=set_, state="unknown", attempts=0, step=None, total_steps=None,
                error=seen.error,
            )  # fmt: skip
        best, last = self._of(run, metric, higher)
        return Row(
            task=task,
            run=run.id,
            job_id=seen.job_id,
            set=set_,
            state=seen.state,
            attempts=len(seen.history),
            step=seen.step,
            total_steps=seen.total_steps,
            best=best,
            last=last,
        )

    def _task(self, run: RunDir) -> int:
        links = (p for p in self._folder.iterdir() if reading.is_count(p.name))
        return next((int(p.name) for p in links if p.resolve().name == run.id), -1)

    def _of(self, run: RunDir, metric: str, higher: bool) -> tuple[Value | None, Value | None]:
        files = [path for a in run.attempts() for path in run.metrics_files(a.n)]
        sizes = tuple(path.stat().st_size if path.exists() else 0 for path in files)
        known = self._values.get(run.id)
        if known is None or known[0] != sizes:
            known = (sizes, _values(run, metric, higher))
            self._values[run.id] = known
        return known[1]


def _values(run: RunDir, metric: str, higher: bool) -> tuple[Value | None, Value | None]:
    found = metric_curves.read(run, [metric]).curve(metric)
    best = found.best(higher=higher)
    if best is None:
        return None, None
    return Value(found.steps[best], found.y[best]), Value(found.steps[-1], found.y[-1])


def _made(run: RunDir) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json_files.read(run.record, {"sweep": dict}).value.get("sweep", {})
    except PermissionError:
        return {}
    return found


def _recipes(runs: Sequence[RunDir]) -> dict[str, Recipe]:
    """Of those that read; the error of the first where none does."""
    found: dict[str, Recipe] = {}
    failed: ClusterTrainError | None = None
    for run in runs:
        try:
            found[run.id] = load_spec(run).recipe
        except ClusterTrainError as e:
            failed = failed or e
    if failed is not None and not found:
        raise failed
    return found


def render(found: Sweep, width: int, signs: Glyphs) -> list[RenderableType]:
    done = sum(1 for row in found.runs if row.state in FINAL)
    rule = f"{found.metric}, {'higher' if found.higher_is_better else 'lower'} is better"
    head = Text.assemble((found.sweep, "bold"), f"  {done} of {len(found.runs)} runs have ended; by {rule}")
    keys = list(dict.fromkeys(key for row in found.runs for key in row.set))
    titles = ("", *keys, "best", "at step", "last", "step", "state", "starts", "run")
    cells = zip(*(_cells(row, keys, found.best, signs) for row in found.runs), strict=True)
    columns = [Column(title, column, title not in _WORDS) for title, column in zip(titles, cells, strict=True)]
    lines: list[RenderableType] = [head, "", fitted(columns, width, dropped=("last", "starts", "step", "at step"))]
    lines += [Text(f"{row.run}: {row.error}") for row in found.runs if row.error]
    lines += [Text(f"note: {note}") for note in found.notes]
    return lines + ([Text(f"note: {found.gone} runs of the sweep are gone")] if found.gone else [])


_WORDS = ("", "state", "run")


def _cells(row: Row, keys: Sequence[str], best: str | None, signs: Glyphs) -> list[str | Text]:
    def shown(value: Value | None) -> str:
        return signs.dash if value is None else f"{value.value:.5g}"

    style = "bold green" if row.run == best else ""
    steps = signs.dash if row.step is None else f"{row.step}/{row.total_steps}" if row.total_steps else str(row.step)
    return [
        Text("*" if row.run == best else "", style),
        *(Text(_said(row.set.get(key), signs), style) for key in keys),
        Text(shown(row.best), style),
        signs.dash if row.best is None else str(row.best.step),
        shown(row.last),
        steps,
        status.styled(row.state),
        str(row.attempts),
        Text(row.run, style),
    ]


def _said(value: Any, signs: Glyphs) -> str:
    return f"{value:.6g}" if isinstance(value, float) else said(value, signs.dash)

"""The page that compares runs: what ``clustertrain compare --html`` writes, inside the other pages."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clustertrain.errors import UsageError
from clustertrain.report.html import runs_page
from clustertrain.report.runs import compare_text
from clustertrain.report.runs.compare import compare_runs
from clustertrain.run import metric_curves
from clustertrain.run.metric_curves import Axis
from clustertrain.run.run_dir import RunDir, explain_permission_errors
from clustertrain.ui.live import Change
from clustertrain.ui.rows import run_url
from clustertrain.ui.runs_table import RunsTable
from clustertrain.ui.stamps import status_files, take_stamp
from clustertrain.ui.state import UiState, find_run

MAX_METRICS = 16  # that the page offers


class CompareTopic:
    """Says when the page has to be loaded again; a :class:`clustertrain.ui.live.Topic`.

    That is when one of its runs logged a metric, changed its state or was deleted.
    """

    def __init__(self, table: RunsTable, runs: Sequence[RunDir]) -> None:
        self._table, self._runs = table, runs
        self._cursor = make_cursor(table, runs)

    def refresh(self) -> bool:
        self._table.refresh()
        before, self._cursor = self._cursor, make_cursor(self._table, self._runs)
        return self._cursor != before

    def changes_since(self, cursor: str | None) -> Change | None:
        return None if cursor == self._cursor else Change({}, self._cursor)


def make_cursor(table: RunsTable, runs: Sequence[RunDir]) -> str:
    """Return a hash of what the page of ``runs`` shows: their states, and the sizes and times of their files."""
    statuses = table.statuses()
    states = [getattr(statuses.get(run.id), "state", None) for run in runs]
    stamps = [take_stamp([*status_files(run), run.metrics]) for run in runs]
    return f"{hash((*states, *stamps)) & 0xFFFFFFFFFFFFFFFF:x}"


def routes(state: UiState) -> list[Route]:
    def show(request: Request) -> Response:
        query = request.query_params
        axis = query.get("by", "step")
        if axis not in get_args(Axis):
            raise UsageError(f"by={axis!r}", fix=f"use one of {', '.join(get_args(Axis))}")
        runs = _find_runs(request)
        cursor = make_cursor(state.table, runs)
        if len(runs) < 2:
            raise UsageError("a comparison needs two or more runs", fix="select them in the table of runs")
        metric = query.get("metric")
        with explain_permission_errors():
            # Without telemetry: the page of each run has it, and reading that of long runs takes seconds.
            comparison = compare_runs(runs, [metric] if metric else [], cast(Axis, axis), with_telemetry=False)
            metrics = _list_metrics(runs)
        ids = [run.id for run in runs]
        return state.pages.render(
            "compare.html.j2",
            "runs",
            c=comparison,
            verdict=compare_text.verdict(comparison).plain,
            axes=[(name, _link(ids, {"metric": metric, "by": name})) for name in get_args(Axis)],
            metrics=[(name, _link(ids, {"metric": name, "by": axis})) for name in metrics],
            run_url=run_url,
            data={**runs_page.page_data(comparison), "cursor": cursor},
        )

    async def live(request: Request) -> Response:
        runs = await run_in_threadpool(_find_runs, request)
        key = "/".join(run.id for run in runs)
        return state.hub.stream(request, f"compare:{key}", lambda: CompareTopic(state.table, runs))

    return [Route("/compare", show), Route("/api/live/compare", live)]


def _find_runs(request: Request) -> list[RunDir]:
    return [find_run(name) for name in dict.fromkeys(request.query_params.getlist("run"))]


def _list_metrics(runs: Sequence[RunDir]) -> list[str]:
    """Return the metrics that the runs logged, those first that the first run has."""
    return list(dict.fromkeys(name for run in runs for name in metric_curves.list_scalars(run)))[:MAX_METRICS]


def _link(run_ids: Sequence[str], options: Mapping[str, Any]) -> str:
    pairs = [("run", run_id) for run_id in run_ids] + [(name, value) for name, value in options.items() if value]
    return f"/compare?{urllib.parse.urlencode(pairs, errors='surrogateescape')}"

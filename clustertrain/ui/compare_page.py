"""The page that compares runs: what ``clustertrain compare --html`` writes, inside the other pages."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

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
from clustertrain.ui.rows import run_url
from clustertrain.ui.state import UiState, find_run

MAX_METRICS = 16  # that the page offers


def routes(state: UiState) -> list[Route]:
    def show(request: Request) -> Response:
        query = request.query_params
        axis = query.get("by", "step")
        if axis not in get_args(Axis):
            raise UsageError(f"by={axis!r}", fix=f"use one of {', '.join(get_args(Axis))}")
        runs = [find_run(name) for name in dict.fromkeys(query.getlist("run"))]
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
            data=runs_page.page_data(comparison),
        )

    return [Route("/compare", show)]


def _list_metrics(runs: Sequence[RunDir]) -> list[str]:
    """Return the metrics that the runs logged, those first that the first run has."""
    return list(dict.fromkeys(name for run in runs for name in metric_curves.list_scalars(run)))[:MAX_METRICS]


def _link(run_ids: Sequence[str], options: Mapping[str, Any]) -> str:
    pairs = [("run", run_id) for run_id in run_ids] + [(name, value) for name, value in options.items() if value]
    return f"/compare?{urllib.parse.urlencode(pairs, errors='surrogateescape')}"

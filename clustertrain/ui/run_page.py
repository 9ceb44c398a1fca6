"""The page of one run: a placeholder."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clustertrain import clock
from clustertrain.report.progress import load_progress
from clustertrain.scheduler.run_status import run_status
from clustertrain.ui.pages import json_response
from clustertrain.ui.runs_table import make_row
from clustertrain.ui.state import UiState, find_run


def routes(state: UiState) -> list[Route]:
    def show(request: Request) -> Response:
        run = find_run(request.path_params["run_id"])
        current = run_status(run)
        row = make_row(current, load_progress(current, clock.now()))
        text = msgspec.json.format(msgspec.json.encode(row), indent=2).decode()
        return state.pages.render("run.html.j2", "runs", run=run.id, text=text)

    def status(request: Request) -> Response:
        current = run_status(find_run(request.path_params["run_id"]))
        return json_response(make_row(current, load_progress(current, clock.now())))

    return [Route("/runs/{run_id}", show), Route("/api/runs/{run_id}", status)]

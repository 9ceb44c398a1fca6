"""The home page: the table of all runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clustertrain.ui.pages import json_response
from clustertrain.ui.state import UiState


def routes(state: UiState) -> list[Route]:
    def show(request: Request) -> Response:
        return state.pages.render("runs.html.j2", "runs", data=state.table.document())

    def rows(request: Request) -> Response:
        state.table.refresh(wait=True)
        return json_response(state.table.document())

    async def live(request: Request) -> Response:
        return state.hub.stream(request, "runs", lambda: state.table)

    return [Route("/", show), Route("/api/runs", rows), Route("/api/live/runs", live)]

"""The page of one run: its address, the parts that it asks for, and its streams of changes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clustertrain import clock, reading
from clustertrain.errors import CommandFailed, NotFound, UsageError
from clustertrain.report.html import checkpoints, setup
from clustertrain.run.run_dir import RunDir, runs_folder
from clustertrain.ui.pages import encode_json, json_response
from clustertrain.ui.run import logs, overview, workers
from clustertrain.ui.run.feed import Feeds, RunFeed
from clustertrain.ui.state import UiState, find_run, is_file_name

DISCONNECT_POLL_S = 0.3
DEFAULT_LINES = 500
FIRST_STATUS_S = 0.3  # that the page waits for the status; later, its stream brings it
TABS = (
    ("overview", "Overview"),
    ("training", "Training"),
    ("gpus", "GPUs"),
    ("timeline", "Timeline"),
    ("logs", "Logs"),
    ("setup", "Setup"),
    ("checkpoints", "Checkpoints"),
)


def routes(state: UiState) -> list[Route]:
    feeds = Feeds()

    def find_feed(request: Request) -> RunFeed:
        return feeds.get(find_run(request.path_params["run_id"]), lambda: state.hub.is_closed)

    def show(request: Request) -> Response:
        feed = find_feed(request)
        view = feed.status.get_soon(FIRST_STATUS_S)
        data = {"run": feed.run.id, "status": overview.describe(view) if view is not None else None}
        return state.pages.render("run.html.j2", "runs", run=feed.run.id, tabs=TABS, data=data)

    def api(describe: Callable[[Request, RunFeed], Any], path: str) -> Route:
        def answer(request: Request) -> Response:
            return json_response(describe(request, find_feed(request)))

        return Route(f"/api/runs/{{run_id}}{path}", answer)

    def telemetry(request: Request) -> Response:
        feed = find_feed(request)
        return Response(feed.telemetry.get(), media_type="application/json")

    async def live(request: Request) -> Response:
        run = await run_in_threadpool(_find_also_deleted, request.path_params["run_id"])
        feed = feeds.get(run, lambda: state.hub.is_closed)
        return state.hub.stream(request, f"run:{run.id}", lambda: feed)

    async def live_log(request: Request) -> Response:
        run = await run_in_threadpool(find_run, request.path_params["run_id"])
        path = await run_in_threadpool(logs.find_log, run, request.query_params.get("key", ""))
        return state.hub.stream(request, f"log:{path}", lambda: logs.LogTopic(path))

    return [
        Route("/runs/{run_id}", show),
        api(lambda request, feed: overview.describe(feed.status.get()), ""),
        api(_describe_curves, "/curves"),
        api(
            lambda request, feed: feed.timeline.document(clock.now(), is_final=feed.status.get().is_final), "/timeline"
        ),
        api(lambda request, feed: logs.list_logs(feed.run), "/logs"),
        api(_read_lines, "/logs/lines"),
        Route("/api/runs/{run_id}/logs/search", _search),
        api(lambda request, feed: setup.describe(feed.run), "/setup"),
        api(lambda request, feed: checkpoints.list_rows(feed.run), "/checkpoints"),
        Route("/api/runs/{run_id}/telemetry", telemetry),
        Route("/api/live/runs/{run_id}", live),
        Route("/api/live/runs/{run_id}/log", live_log),
    ]


def _find_also_deleted(run_id: str) -> RunDir:
    """Return the run, also one that has been deleted since its page was opened: the stream then says so."""
    try:
        return find_run(run_id)
    except NotFound:
        if not is_file_name(run_id):
            raise
        return RunDir(runs_folder() / run_id)


def _describe_curves(request: Request, feed: RunFeed) -> dict[str, Any]:
    """Return the curves that the parameters ``name`` choose, all without any."""
    feed.curves.update()
    return feed.curves.document(request.query_params.getlist("name") or None)


def _read_lines(request: Request, feed: RunFeed) -> dict[str, Any]:
    before, after, count = (_parse_number(request, name) for name in ("before", "after", "count"))
    key = request.query_params.get("key", "")
    return logs.read_lines(feed.run, key, count=count or DEFAULT_LINES, before=before, after=after)


def _parse_number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is not None and not reading.is_unsigned_int(text):
        raise UsageError(f"{name}={text!r} is not a number", fix="leave it out")
    return None if text is None else int(text)


async def _search(request: Request) -> Response:
    """Search in the logs of the parameters ``key``, or of all ranks of the ``attempt``, for ``text``."""
    run = await run_in_threadpool(find_run, request.path_params["run_id"])
    text, is_regex = request.query_params.get("text", ""), request.query_params.get("regex") == "1"
    logs.parse_query(text, is_regex=is_regex)
    paths = await run_in_threadpool(_searched_logs, run, request)
    cancelled = threading.Event()
    work = asyncio.ensure_future(
        run_in_threadpool(
            workers.call,
            workers.SearchRequest(logs=paths, text=text, is_regex=is_regex),
            workers.SEARCH_TIMEOUT_S,
            cancelled.is_set,
        )
    )
    while not work.done():
        await asyncio.wait([work], timeout=DISCONNECT_POLL_S)
        if await request.is_disconnected():
            cancelled.set()
    try:
        answer = work.result()
    except CommandFailed as e:
        raise CommandFailed(
            f"the search did not finish: {e.message}", fix="search for text, or for an expression without (…+)+"
        ) from e
    return Response(answer or encode_json(None), media_type="application/json")


def _searched_logs(run: RunDir, request: Request) -> dict[str, bytes]:
    keys = request.query_params.getlist("key")
    paths = (
        {key: logs.find_log(run, key) for key in keys}
        if keys
        else logs.rank_log_paths(run, _parse_number(request, "attempt"))
    )
    return {key: os.fsencode(path) for key, path in paths.items()}

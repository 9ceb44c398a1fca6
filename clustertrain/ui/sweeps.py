"""The pages of sweeps: all of them with their best points, and one with its points live."""

from __future__ import annotations

import secrets
import threading
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clustertrain.errors import ClusterTrainError, NotFound
from clustertrain.report.runs.sweep import SweepReader
from clustertrain.run.run_dir import explain_permission_errors, sweeps_folder
from clustertrain.ui.live import Change
from clustertrain.ui.pages import encode_json, json_response
from clustertrain.ui.rows import run_url
from clustertrain.ui.runs_table import RunsTable
from clustertrain.ui.state import UiState, is_file_name


class SweepTopic:
    """The results of one sweep; a :class:`clustertrain.ui.live.Topic`."""

    def __init__(self, folder: Path, table: RunsTable) -> None:
        self._folder, self._table = folder, table
        self._reader = SweepReader(folder)
        self._lock = threading.Lock()
        self._boot, self._version = secrets.token_hex(4), 0
        self._encoded, self._document = b"", dict[str, Any]()

    def read(self) -> dict[str, Any]:
        """Return the results now. Metrics that have not changed are not read again.

        Raises:
            NotFound: the sweep was deleted.
            ClusterTrainError: none of its runs can be read.
        """
        if not self._folder.is_dir():
            raise NotFound(f"the sweep {self._folder.name} was deleted", fix="the page of sweeps has those that exist")
        with self._lock, explain_permission_errors():
            results = self._reader.read(self._table.statuses())
        document: dict[str, Any] = msgspec.to_builtins(results)
        for row in document["runs"]:
            row["url"] = run_url(row["run"])
        document["error"] = None
        return document

    def refresh(self) -> bool:
        self._table.refresh()
        try:
            document = self.read()
        except (ClusterTrainError, OSError) as e:
            document = {"sweep": self._folder.name, "error": str(e)}
        encoded = encode_json(document)
        with self._lock:
            if encoded == self._encoded:
                return False
            self._encoded, self._document, self._version = encoded, document, self._version + 1
            return True

    def changes_since(self, cursor: str | None) -> Change | None:
        with self._lock:
            current = f"{self._boot}-{self._version}"
            return None if self._version == 0 or cursor == current else Change(self._document, current)


class Sweeps:
    """All sweeps, each with its reader."""

    def __init__(self, table: RunsTable) -> None:
        self._table = table
        self._topics: dict[str, SweepTopic] = {}
        self._lock = threading.Lock()

    def topic(self, name: str) -> SweepTopic:
        """Return the sweep with exactly this name.

        Raises:
            NotFound: there is none.
        """
        folder = sweeps_folder() / name
        if not is_file_name(name) or not folder.is_dir():
            raise NotFound(f"there is no sweep {name!r} in {sweeps_folder()}", fix="open it from the page of sweeps")
        with self._lock:
            return self._topics.setdefault(name, SweepTopic(folder, self._table))

    def list_rows(self) -> list[dict[str, Any]]:
        """Return one row per sweep, newest first."""
        rows = []
        for folder in _list_folders():
            row: dict[str, Any] = {"sweep": folder.name, "url": f"/sweeps/{urllib.parse.quote(folder.name, safe='')}"}
            row |= {"created": folder.stat().st_mtime, "error": None}
            try:
                document = self.topic(folder.name).read()
            except (ClusterTrainError, OSError) as e:
                rows.append(row | {"error": str(e)})
                continue
            points = document["runs"]
            best = next((point for point in points if point["run"] == document["best"]), None)
            rows.append(
                row
                | {name: document[name] for name in ("metric", "higher_is_better", "deleted")}
                | {"points": len(points), "states": Counter(point["state"] for point in points), "best": best}
            )
        return rows


def _list_folders() -> list[Path]:
    try:
        with explain_permission_errors():
            folders = [path for path in sweeps_folder().iterdir() if path.is_dir() and not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folders, key=lambda path: -path.stat().st_mtime)


def routes(state: UiState) -> list[Route]:
    sweeps = Sweeps(state.table)

    def show_all(request: Request) -> Response:
        state.table.refresh()  # a sweep asks for the statuses that are not known yet
        return state.pages.render("sweeps.html.j2", "sweeps", sweeps=sweeps.list_rows())

    def show(request: Request) -> Response:
        topic = sweeps.topic(request.path_params["name"])
        topic.refresh()
        change = topic.changes_since(None)
        data = {"results": change.data if change else None, "cursor": change.cursor if change else None}
        return state.pages.render("sweep.html.j2", "sweeps", sweep=request.path_params["name"], data=data)

    def results(request: Request) -> Response:
        state.table.refresh()  # a sweep asks for the statuses that are not known yet
        return json_response(sweeps.topic(request.path_params["name"]).read())

    async def live(request: Request) -> Response:
        name = request.path_params["name"]
        topic = await run_in_threadpool(sweeps.topic, name)
        return state.hub.stream(request, f"sweep:{name}", lambda: topic)

    return [
        Route("/sweeps", show_all),
        Route("/sweeps/{name}", show),
        Route("/api/sweeps/{name}", results),
        Route("/api/live/sweeps/{name}", live),
    ]

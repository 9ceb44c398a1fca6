"""The table of all runs: one row per run, kept up to date from the files that change."""

from __future__ import annotations

import secrets
import threading
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clustertrain import clock
from clustertrain.report.progress import Progress, load_progress
from clustertrain.run.lookup import list_runs
from clustertrain.scheduler.run_status import RunStatus, Unreadable, run_statuses
from clustertrain.ui.live import Change
from clustertrain.ui.pages import json_response

if TYPE_CHECKING:
    from clustertrain.ui.state import UiState


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are UTC epoch s; durations end in ``_s``. None: unknown."""

    run: str
    url: str
    name: str | None = None
    state: str | None = None
    step: int | None = None
    total_steps: int | None = None
    eta_s: float | None = None
    step_s: float | None = None
    loss: float | None = None
    goodput: float | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    submitted: float | None = None
    attempts: int = 0
    job_id: str | None = None
    problem: str | None = None
    """Why the run needs its owner."""
    error: str | None = None
    """Why the run cannot be read."""


def run_url(run_id: str) -> str:
    return f"/runs/{urllib.parse.quote(run_id, safe='', errors='surrogateescape')}"


def make_row(status: RunStatus, progress: Progress) -> RunRow:
    return RunRow(
        run=status.run.id,
        url=run_url(status.run.id),
        name=status.name,
        state=status.state,
        step=status.step,
        total_steps=status.total_steps,
        eta_s=progress.eta_s,
        step_s=progress.step_s,
        loss=progress.loss,
        goodput=status.goodput.ratio,
        nodes=progress.nodes,
        gpus_per_node=progress.gpus_per_node,
        submitted=progress.submitted,
        attempts=len(status.history),
        job_id=status.job_id,
        problem=status.undecided_reason,
    )


class RunsTable:
    """The rows of all runs; a :class:`clustertrain.ui.live.Topic`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boot = secrets.token_hex(4)  # cursors of another server are unknown
        self._version = 0
        self._rows: dict[str, tuple[int, RunRow]] = {}
        self._removed: dict[str, int] = {}

    def refresh(self) -> bool:
        now = clock.now()
        rows = {}
        for status in run_statuses(list_runs()):
            if isinstance(status, Unreadable):
                rows[status.run.id] = RunRow(run=status.run.id, url=run_url(status.run.id), error=status.error)
            else:
                rows[status.run.id] = make_row(status, load_progress(status, now, with_failure=False))
        return self._replace(rows)

    def _replace(self, rows: Mapping[str, RunRow]) -> bool:
        with self._lock:
            version = self._version + 1
            changed = {run: row for run, row in rows.items() if run not in self._rows or self._rows[run][1] != row}
            removed = [run for run in self._rows if run not in rows]
            if not changed and not removed and self._version:
                return False
            self._version = version
            self._rows |= {run: (version, row) for run, row in changed.items()}
            for run in removed:
                del self._rows[run]
                self._removed[run] = version
            for run in rows:
                self._removed.pop(run, None)
            return True

    def changes_since(self, cursor: str | None) -> Change | None:
        boot, _, text = (cursor or "").partition("-")
        known = int(text) if boot == self._boot and text.isdigit() else None
        with self._lock:
            if self._version in (0, known):
                return None
            rows = [row for version, row in self._rows.values() if version > (known or 0)]
            removed = [run for run, version in self._removed.items() if version > (known or 0)]
            data = {"now": clock.now(), "full": known is None, "rows": rows, "removed": removed}
            return Change(data, f"{self._boot}-{self._version}")

    def document(self) -> dict[str, Any]:
        """Return all rows as of the last refresh, with the cursor for what follows."""
        change = self.changes_since(None)
        if change is None:
            return {"now": clock.now(), "full": True, "rows": [], "removed": [], "cursor": None}
        return {**change.data, "cursor": change.cursor}


def routes(state: UiState) -> list[Route]:
    def show(request: Request) -> Response:
        return state.pages.render("runs.html.j2", "runs", data=state.table.document())

    def rows(request: Request) -> Response:
        state.table.refresh()
        return json_response(state.table.document())

    async def live(request: Request) -> Response:
        return state.hub.stream(request, "runs", lambda: state.table)

    return [Route("/", show), Route("/api/runs", rows), Route("/api/live/runs", live)]

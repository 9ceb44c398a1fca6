"""Server-sent events: one thread polls what pages watch, and each page receives what has changed since it last looked.

A :class:`Topic` is one thing to watch, such as the table of runs. Its cursor says what a page has; a page that lost its
connection sends the cursor of its last event, as the browser's EventSource does, and misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from clustertrain import clock
from clustertrain.printable import printable
from clustertrain.ui.pages import encode_json

log = logging.getLogger(__name__)

POLL_S = 1.0
PING_S = 15.0  # a page that hears nothing for longer connects anew
RETRY_MS = 1000


class Change(NamedTuple):
    """What a page receives."""

    data: Any
    """Becomes JSON."""
    cursor: str
    """What the page has after this change. One line of ASCII."""


class Topic(Protocol):
    """One thing that pages watch. Its methods are called in several threads."""

    def refresh(self) -> bool:
        """Read what has changed in the files; return whether there is anything new. Called by one thread for all pages.

        It must not take long, because all topics share the thread: leave the expensive part to another thread.
        """
        ...

    def changes_since(self, cursor: str | None) -> Change | None:
        """Return what is new since ``cursor``, everything for None or an unknown cursor; None if nothing is new."""
        ...


@dataclass
class _Watched:
    topic: Topic
    events: set[asyncio.Event] = field(default_factory=set)
    failure: str = ""  # the last one that was logged


class Hub:
    """The thread that polls all watched topics."""

    def __init__(self, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._wake, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End all streams and the thread. Safe in a signal handler of the event loop's thread."""
        self._closed = True
        self._wake.set()
        self.changed()

    def stream(self, request: Request, key: str, make_topic: Callable[[], Topic]) -> StreamingResponse:
        """Return the stream of a topic's changes. Pages that watch the same ``key`` share one topic.

        The page names what it has in the header Last-Event-ID or in the parameter ``since``.
        """
        cursor = request.headers.get("last-event-id") or request.query_params.get("since")
        return StreamingResponse(
            self._iter_events(key, make_topic, cursor),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    async def _iter_events(self, key: str, make_topic: Callable[[], Topic], cursor: str | None) -> AsyncIterator[bytes]:
        yield f"retry: {RETRY_MS}\n\n".encode()
        async with self._watching(key, make_topic) as (watched, event):
            while not self._closed:
                event.clear()
                change = await run_in_threadpool(watched.topic.changes_since, cursor)
                if change is not None:
                    cursor = change.cursor
                    yield f"id: {cursor}\ndata: ".encode() + encode_json(change.data) + b"\n\n"
                try:
                    await asyncio.wait_for(event.wait(), PING_S)
                except TimeoutError:
                    yield b"event: ping\ndata: \n\n"

    @contextlib.asynccontextmanager
    async def _watching(
        self, key: str, make_topic: Callable[[], Topic]
    ) -> AsyncIterator[tuple[_Watched, asyncio.Event]]:
        event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        with self._lock:
            if key not in self._watched:
                self._watched[key] = _Watched(make_topic())
            watched = self._watched[key]
            watched.events.add(event)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._poll, name="ui-poll", daemon=True)
                self._thread.start()
        self._wake.set()
        try:
            yield watched, event
        finally:
            with self._lock:
                watched.events.discard(event)
                if not watched.events:
                    self._watched.pop(key, None)

    def _poll(self) -> None:
        while not self._closed:
            started = clock.monotonic()
            with self._lock:
                all_watched = list(self._watched.values())
            if not all_watched:
                self._wake.wait()
                self._wake.clear()
                continue
            if any([_refresh(watched) for watched in all_watched]):  # noqa: C419  (all of them)
                self.changed()
            self._wake.wait(max(0.05, self._poll_s - (clock.monotonic() - started)))
            self._wake.clear()

    def changed(self) -> None:
        """Have all streams look for changes. For threads of topics; :meth:`Topic.refresh` only returns True."""
        loop = self._loop
        if loop is None:
            return
        for watched in list(self._watched.values()):
            for event in list(watched.events):
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(event.set)


def _refresh(watched: _Watched) -> bool:
    try:
        return watched.topic.refresh()
    except Exception as e:  # the thread's edge: one topic whose files are damaged must not end the others
        failure = f"{type(e).__name__}: {e}"
        if failure != watched.failure:
            watched.failure = failure
            log.warning("%s is not updated: %s", type(watched.topic).__name__, printable(failure))
        return False

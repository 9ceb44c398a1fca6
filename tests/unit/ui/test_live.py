"""Streams of changes: what a page receives, also after a lost connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from clustertrain.ui import live
from clustertrain.ui.live import Change, Hub


class Counter:
    """A topic that counts up when told to."""

    def __init__(self) -> None:
        self.value, self.is_due, self.fails = 1, False, False
        self.refreshed = 0

    def refresh(self) -> bool:
        self.refreshed += 1
        if self.fails:
            raise OSError("damaged")
        was_due, self.is_due = self.is_due, False
        self.value += was_due
        return was_due

    def changes_since(self, cursor: str | None) -> Change | None:
        return None if cursor == str(self.value) else Change({"value": self.value, "of": float("nan")}, str(self.value))


def request(headers: dict[str, str] | None = None, query: str = "") -> Request:
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "headers": pairs, "query_string": query.encode()})


def stream(hub: Hub, topic: Counter, **of_request: Any) -> AsyncIterator[bytes]:
    response = hub.stream(request(**of_request), "counter", lambda: topic)
    assert response.media_type == "text/event-stream"
    return response.body_iterator  # type: ignore[return-value]


async def next_event(events: AsyncIterator[bytes]) -> tuple[str, Any]:
    """Return id and data of the next event."""
    async for part in events:
        lines = dict(line.split(": ", 1) for line in part.decode().splitlines() if ": " in line)
        if "id" in lines:
            return lines["id"], json.loads(lines["data"])
    raise EOFError


def test_all_pages_share_a_topic_and_receive_each_change() -> None:
    async def watch() -> None:
        hub, topic = Hub(poll_s=0.05), Counter()
        pages = [stream(hub, topic) for _ in range(3)]
        for page in pages:
            assert await next_event(page) == ("1", {"value": 1, "of": None})
        topic.is_due = True
        for page in pages:
            assert await asyncio.wait_for(next_event(page), 10) == ("2", {"value": 2, "of": None})
        hub.close()
        for page in pages:
            with pytest.raises(EOFError):
                await asyncio.wait_for(next_event(page), 10)

    asyncio.run(watch())


@pytest.mark.parametrize("known", [{"headers": {"last-event-id": "6"}}, {"query": "since=6"}])
def test_a_page_that_lost_its_connection_says_what_it_has(known: dict[str, Any]) -> None:
    async def watch() -> None:
        hub, topic = Hub(poll_s=0.05), Counter()
        topic.value = 6
        page = stream(hub, topic, **known)
        waiting = asyncio.ensure_future(next_event(page))
        await asyncio.sleep(0)
        topic.is_due = True
        assert (await asyncio.wait_for(waiting, 10))[0] == "7", "not 6 again"
        hub.close()

    asyncio.run(watch())


def test_a_topic_that_fails_ends_no_stream_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "PING_S", 0.05)

    async def watch() -> None:
        hub, topic = Hub(poll_s=0.05), Counter()
        topic.fails = True
        page = stream(hub, topic)
        await next_event(page)
        before = topic.refreshed
        while topic.refreshed < before + 2:
            assert b"ping" in await asyncio.wait_for(anext(page), 10)
        topic.fails, topic.is_due = False, True
        assert (await asyncio.wait_for(next_event(page), 10))[0] == "2"
        hub.close()

    asyncio.run(watch())
    assert caplog.text.count("is not updated: ") == 1


def test_nobody_watching_costs_nothing() -> None:
    async def watch() -> None:
        hub, topic = Hub(poll_s=0.01), Counter()
        page = stream(hub, topic)
        await next_event(page)
        await page.aclose()  # type: ignore[attr-defined]
        assert hub._watched == {}
        hub.close()

    asyncio.run(watch())

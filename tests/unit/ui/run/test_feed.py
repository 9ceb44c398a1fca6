"""What an open page receives: only what has changed since it last heard."""

from __future__ import annotations

import os
import shutil

import pytest

from clustertrain import clock, fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.ui.run import status, telemetry
from clustertrain.ui.run.feed import Feeds, RunFeed


@pytest.fixture
def feed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> RunFeed:
    monkeypatch.setattr(telemetry.TelemetryFeed, "start_if_due", lambda self: None)
    monkeypatch.setattr(status, "MAX_SHARE", 1e9)  # no pause between two queries
    feed = RunFeed(run)
    feed.status.get()
    feed.refresh()
    return feed


def append_row(run: RunDir, step: int) -> None:
    log = fsio.JsonlAppender(run.metrics_path(1))
    log.append({"step": step, "t": clock.now(), "loss": 0.5, "step_s": 0.5})
    log.close()


def append_event(run: RunDir, **event: object) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
    log.append({"t": clock.now(), **event})
    log.close()


def test_first_change_has_the_status_and_names_the_rest(feed: RunFeed) -> None:
    change = feed.changes_since(None)
    assert change is not None
    assert change.data["status"]["state"] == "running" and change.data["status"]["step"] == 1200
    assert change.data["curves"] == change.data["timeline"] == "changed"
    assert feed.changes_since(change.cursor) is None
    restarted = feed.changes_since("0badcafe" + change.cursor[8:])
    assert restarted is not None and "status" in restarted.data, "the cursor of another server is unknown"


def test_new_row_is_sent_alone_with_the_step(feed: RunFeed) -> None:
    cursor = feed.cursor
    append_row(feed.run, 1201)
    assert feed.refresh()
    change = feed.changes_since(cursor)
    assert change is not None
    assert [r["step"] for r in change.data["rows"]] == [1201] and "curves" not in change.data
    assert change.data["status"]["step"] == 1201 and change.data["status"]["loss"] == 0.5
    assert "timeline" not in change.data and not feed.refresh()


def test_preemption_changes_timeline_and_state(feed: RunFeed) -> None:
    cursor = feed.cursor
    append_event(feed.run, event="signal", signal="SIGTERM", source="preemption")
    append_event(feed.run, event="ended", ending="preempted", reason="preempted", last_step=1200)
    assert clock.wait_until(lambda: feed.refresh() and _ending(feed) == "preempted", 10.0, 0.05)
    change = feed.changes_since(cursor)
    assert change is not None and change.data["timeline"] == "changed" and "rows" not in change.data
    document = feed.timeline.document(clock.now(), is_final=False)
    assert [m["kind"] for m in document["marks"]][-2:] == ["signal", "ended"] and "Stops" in document["lanes"]
    assert document["attempts"][0]["ending"] == "preempted"


def _ending(feed: RunFeed) -> str | None:
    history = getattr(feed.status.get().status, "history", [])
    return history[-1].ending if history else None


def test_deleted_run_says_so_once(feed: RunFeed) -> None:
    shutil.rmtree(feed.run.path)
    assert feed.refresh()
    change = feed.changes_since(feed.cursor)
    assert change is not None and change.data == {"deleted": True}
    assert feed.changes_since(change.cursor) is None and not feed.refresh()


def test_damaged_run_is_named(run: RunDir) -> None:
    run.spec.write_text("job = [")
    change = RunFeed(run).changes_since(None)
    assert change is not None
    assert change.data["status"]["state"] is None and "spec.toml" in change.data["status"]["error"]


def test_unreadable_attempt_is_named_and_the_others_are_shown(feed: RunFeed) -> None:
    feed.run.attempt(2).path.mkdir()
    feed.run.attempt(2).events.write_text("no folder")
    feed.run.attempt(3).events.mkdir(parents=True)
    os.mkfifo(feed.run.attempt(3).events_path("batch"))
    document = feed.timeline.document(clock.now(), is_final=True)
    assert [a["n"] for a in document["attempts"]] == [1, 2, 3] and document["attempts"][0]["end"] is not None
    assert len(document["problems"]) == 1 and "attempt 3" in document["problems"][0]
    assert len(document["marks"]) > 5


def test_events_of_others_are_harmless_text(feed: RunFeed) -> None:
    append_event(feed.run, event="ended", ending="failed", reason="\x1b]0;x\x07 <b> \u202egnp.exe")
    document = feed.timeline.document(clock.now(), is_final=False)
    assert document["marks"][-1]["text"] == r"failed: \x1b]0;x\x07 <b> \u202egnp.exe"


def test_oldest_feed_is_dropped(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustertrain.ui.run.feed.MAX_FEEDS", 2)
    feeds = Feeds()
    runs = [RunDir(run.path.with_name(f"r{i}")) for i in range(3)]
    first = [feeds.get(r, lambda: False) for r in runs]
    assert feeds.get(runs[2], lambda: False) is first[2] and feeds.get(runs[0], lambda: False) is not first[0]

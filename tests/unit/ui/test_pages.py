"""The pages of sweeps, usage and comparisons, and the files that pages load."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from clustertrain import clock, fsio
from clustertrain.run.run_dir import sweeps_folder
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.ui import usage
from clustertrain.ui.runs_table import RunsTable
from clustertrain.ui.usage import CAUSES, IDLE, LABELS, NOT_WASTE, PRODUCTIVE, UNKNOWN, split_by_cause, split_by_week
from tests import ui_home
from tests.ui_home import Made
from tests.unit.ui.clients import signed_in

NOW = time.time()


def point(name: str = "sweep", state: str = "completed", **changes: object) -> Made:
    return Made(name, state, steps=60, total=60, rows=60, telemetry=False, **changes)


def make_sweep(home: Path) -> Path:
    points = [({"optim.lr": lr}, point(loss=loss)) for lr, loss in ((1e-4, 3.0), (1e-3, 2.0), (1e-2, 4.0))]
    return ui_home.make_sweep(home, NOW, "lr-abcdef", points)


def test_sweeps_show_their_best_point(home: Path) -> None:
    make_sweep(home)
    client = signed_in()
    page = client.get("/sweeps").text
    assert 'href="/sweeps/lr-abcdef"' in page and "3 completed" in page and "optim.lr = 0.001" in page
    results = client.get("/api/sweeps/lr-abcdef").json()
    assert [row["values"]["optim.lr"] for row in results["runs"]] == [1e-3, 1e-4, 1e-2], "best first"
    assert results["best"] == results["runs"][0]["run"] and results["runs"][0]["url"].startswith("/runs/sweep-")
    assert client.get("/sweeps/lr-abcdef").status_code == 200


def test_a_sweep_whose_runs_are_damaged_or_gone(home: Path) -> None:
    folder = make_sweep(home)
    (folder / "1" / "spec.toml").write_text("[job\n")
    (sweeps_folder() / "empty-abcdef").mkdir()
    client = signed_in()
    results = client.get("/api/sweeps/lr-abcdef").json()
    assert [row["error"] is None for row in results["runs"]] == [True, True, False]
    for task in "02":
        (folder / task / "spec.toml").write_text("[job\n")
    answer = client.get("/api/sweeps/lr-abcdef")
    assert answer.status_code == 500 and "spec.toml" in answer.json()["error"] and answer.json()["fix"]
    page = client.get("/sweeps")
    assert page.status_code == 200 and "spec.toml" in page.text and "empty-abcdef" in page.text
    assert client.get("/sweeps/lr-abcdef").status_code == 200


@pytest.mark.parametrize(
    "path", ["/sweeps/nothing", "/sweeps/.hidden", "/api/live/sweeps/nothing", f"/sweeps/{'x' * 5000}"]
)
def test_a_sweep_that_does_not_exist(home: Path, path: str) -> None:
    answer = signed_in().get(path)
    assert answer.status_code == 404 and "there is no sweep" in answer.text


def test_compare_shows_the_better_run_first_in_words(home: Path) -> None:
    runs = [ui_home.make_run(home, NOW, point(name, loss=loss), seed=i).id
            for i, (name, loss) in enumerate((("a", 2.0), ("b", 3.0)))]  # fmt: skip
    client = signed_in()
    page = client.get(f"/compare?run={runs[0]}&run={runs[1]}").text
    assert f"A ({runs[0]}) is best" in page and f'href="/runs/{runs[1]}"' in page and "by=tokens" in page
    page = client.get(f"/compare?run={runs[0]}&run={runs[1]}&metric=lr&by=hours").text
    assert "compared by lr" in page


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "two or more"),
        ("run={run}", "two or more"),
        ("run={run}&run={run}", "two or more"),
        ("run={run}&run=nothing", "there is no run"),
        ("run={run}&run={other}&by=miles", "by="),
        ("run={run}&run={other}&metric=%3Cb%3E", "&lt;b&gt;: no run logged it"),
    ],
)
def test_a_comparison_that_is_not_possible(home: Path, query: str, words: str) -> None:
    run, other = (ui_home.make_run(home, NOW, point(), seed=i).id for i in range(2))
    answer = signed_in().get("/compare?" + query.format(run=run, other=other))
    assert answer.status_code in (400, 404) and words in answer.text and "What to do" in answer.text


def test_usage_adds_up(home: Path) -> None:
    ui_home.make_run(home, NOW, point("a", age_s=1000.0, queue_s=100.0, step_s=10.0, gpus=4))
    ui_home.make_run(home, NOW, point("b", "failed", age_s=40 * 86400.0, preempted=1), seed=1)
    ui_home.make_run(home, NOW, point("c", "pending"), seed=2)
    client = signed_in()
    usage = client.get("/api/usage").json()
    assert usage["runs"] == 3 and usage["gpu_hours"] == pytest.approx(sum(usage["by_cause"].values()))
    assert usage["gpu_hours"] == pytest.approx(sum(week["gpu_hours"] for week in usage["weeks"]))
    assert usage["wasted_gpu_hours"] == pytest.approx(
        sum(hours for cause, hours in usage["by_cause"].items() if cause not in NOT_WASTE)
    )
    assert len(usage["weeks"]) in (6, 7) and usage["weeks"][0]["start"] < usage["weeks"][-1]["start"]
    assert {run["run"][0] for run in usage["most_wasteful"]} == {"a", "b"}
    page = client.get("/usage").text
    assert "GPU-hours by week" in page and "productive steps" in page


def test_usage_changes_with_the_state_of_a_run_and_each_minute(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ui_home.make_run(home, NOW, point("a", "running"))
    now = NOW // usage.INTERVAL_S * usage.INTERVAL_S
    monkeypatch.setattr(clock, "now", lambda: now)
    table = RunsTable()
    table.read_all()
    topic = usage.UsageTopic(table)
    cursors = [usage.make_cursor(table)]
    assert topic.changes_since(cursors[0]) is None and not topic.refresh(), "what the page has"
    with run.metrics_path(1).open("a") as f:
        f.write(json.dumps({"step": 61, "t": NOW, "loss": 1.0, "step_s": 1.0}) + "\n")
    now += usage.INTERVAL_S - 1
    assert not topic.refresh(), "a step changes little"
    now += 1
    assert topic.refresh()
    cursors.append(take(topic, cursors))
    ui_home.make_run(home, NOW, point("b"), seed=1)
    table.refresh(wait=True)
    assert topic.refresh() and not topic.refresh()
    cursors.append(take(topic, cursors))
    with run.attempt(1).events_path("batch").open("a") as f:
        f.write(json.dumps({"t": NOW, "event": "ended", "ending": "completed", "last_step": 61}) + "\n")
    table.refresh(wait=True)
    assert topic.refresh()
    cursors.append(take(topic, cursors))
    shutil.rmtree(run.path)
    assert topic.refresh()
    assert take(topic, [None, "", "another server's", *cursors]) not in cursors
    table.close()


def take(topic: usage.UsageTopic, cursors: Sequence[str | None]) -> str:
    """Return the topic's cursor, after all pages with one of ``cursors`` have heard of it."""
    changes = [topic.changes_since(cursor) for cursor in cursors]
    (cursor,) = {change.cursor for change in changes if change is not None}
    assert None not in changes and topic.changes_since(cursor) is None
    return cursor


def test_little_usage_is_not_zero(home: Path) -> None:
    ui_home.make_run(home, NOW, point(age_s=100.0, queue_s=0.0, step_s=1.0, gpus=1))
    page = signed_in().get("/usage").text
    assert "&lt;0.1" in page and ">0.0<" not in page


def test_times_of_damaged_files_do_not_count(home: Path) -> None:
    run = ui_home.make_run(home, NOW, point())
    events = run.attempt(1).events_path("batch")
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for t in ((0.0, 2.5e11), (1e11, 2e11)):
        pairs = zip(lines, t, strict=True)
        events.write_text("".join(json.dumps(line | {"t": time_}) + "\n" for line, time_ in pairs))
        usage = signed_in().get("/api/usage").json()
        assert 0 <= usage["gpu_hours"] <= 8 * 3661 * 24 and len(usage["weeks"]) <= 12


def test_usage_without_runs(home: Path) -> None:
    assert "No run has used a GPU yet" in signed_in().get("/usage").text


def test_hours_are_split_at_midnight_before_monday() -> None:
    sunday = datetime.datetime(2026, 11, 29, 22).timestamp()
    weeks = list(split_by_week(sunday, sunday + 8 * 86400))
    assert [day.isoformat() for day, _ in weeks] == ["2026-11-23", "2026-11-30", "2026-12-07"]
    assert [hours for _, hours in weeks] == pytest.approx([2, 168, 22])
    assert list(split_by_week(sunday, sunday)) == [] and list(split_by_week(sunday, sunday - 1)) == []


def test_causes_follow_the_ledger() -> None:
    ledger = Goodput(wall_s=200, queue_s=100, productive_s=50, startup_s=20, lost_s=30, ratio=0.25)
    assert split_by_cause(ledger, 10.0, 0.0) == pytest.approx({PRODUCTIVE: 5, "startup": 2, "lost": 3})
    assert split_by_cause(ledger, 10.0, 2.0) == pytest.approx({PRODUCTIVE: 3, IDLE: 2, "startup": 2, "lost": 3})
    assert split_by_cause(ledger, 10.0, 99.0)[IDLE] == pytest.approx(5), "no more than there is"
    unknown = Goodput(wall_s=100, startup_s=20, other_s=80, ratio=None)
    assert split_by_cause(unknown, 10.0, 0.0) == pytest.approx({"startup": 2, UNKNOWN: 8})
    assert split_by_cause(Goodput(), 0.0, 0.0) == {}
    assert set(CAUSES) == {name.removesuffix("_s") for name in TIME_CATEGORIES[1:]} | {IDLE, UNKNOWN}
    assert set(LABELS) >= set(CAUSES)


def test_hostile_settings_stay_text(home: Path) -> None:
    folder = make_sweep(home)
    evil = "</script><img src=x onerror=alert(1)>"
    record = (folder / "1").resolve() / "record.json"
    fsio.write_json(record, {"sweep": {"values": {evil: evil}}})
    client = signed_in()
    for path in ("/sweeps", "/sweeps/lr-abcdef"):
        assert "<img src=x" not in client.get(path).text


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ui.css", "text/css"), ("runs.js", "text/javascript"), ("uPlot.iife.min.js", "text/javascript"),
     ("compare.js", "text/javascript"), ("text.js", "text/javascript"), ("icon.svg", "image/svg+xml")],
)  # fmt: skip
def test_pages_load_their_files_from_this_server(name: str, kind: str) -> None:
    answer = signed_in().get(f"/static/{name}")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
    assert answer.headers["cache-control"] == "no-cache"


def test_templates_are_not_served() -> None:
    for name in ("base.html.j2", "job.sh.j2", "uPlot.LICENSE", ""):
        assert signed_in().get(f"/static/{name}").status_code == 404

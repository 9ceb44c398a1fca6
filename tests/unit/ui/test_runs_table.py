"""The table of all runs: what it shows, and what it sends when files change."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from clustertrain import proc
from clustertrain.errors import CommandFailed
from clustertrain.run.run_dir import RunDir, permission_error
from clustertrain.scheduler import run_status
from clustertrain.ui import details, runs_table
from clustertrain.ui.rows import Details
from clustertrain.ui.runs_table import RunsTable
from tests import ui_home
from tests.ui_home import Made
from tests.unit.ui.clients import signed_in

NOW = time.time()


def small(name: str = "lm", state: str = "completed", **changes: object) -> Made:
    return Made(name, state, steps=60, total=100, rows=60, telemetry=False, **changes)


def append_row(run: Path, step: int, loss: float) -> None:
    with (run / "metrics" / "attempt-1.jsonl").open("a") as f:
        f.write(json.dumps({"step": step, "t": time.time(), "loss": loss, "step_s": 1.0}) + "\n")


def test_rows_have_what_the_list_command_shows(home: Path) -> None:
    made = [small("a", "running"), small("b", "completed"), small("c", "failed"), small("d", "pending")]
    ids = [ui_home.make_run(home, NOW, one, seed=i).id for i, one in enumerate(made)]
    table = RunsTable()
    table.refresh(wait=True)
    rows = {row.run: row for row in table.document()["rows"]}
    assert [rows[i].state for i in ids] == ["running", "completed", "failed", "pending"]
    running = rows[ids[0]]
    assert (running.step, running.total_steps, running.nodes, running.gpus_per_node) == (60, 100, 1, 8)
    assert running.eta_s and running.loss and running.submitted == pytest.approx(NOW - 6 * 3600, abs=1)
    assert rows[ids[2]].reason and "out of memory" in rows[ids[2]].reason and rows[ids[3]].reason == "Priority"
    table.close()


def test_only_changed_rows_are_sent(home: Path) -> None:
    runs = [ui_home.make_run(home, NOW, small("a", "running")), ui_home.make_run(home, NOW, small("b"), seed=1)]
    table = RunsTable()
    table.refresh(wait=True)
    cursor = table.document()["cursor"]
    assert table.changes_since(cursor) is None
    append_row(runs[0].path, 61, 1.25)
    assert table.refresh()
    change = table.changes_since(cursor)
    assert change is not None and not change.data["full"]
    assert [(row.run, row.step, row.loss) for row in change.data["rows"]] == [(runs[0].id, 61, 1.25)]
    shutil.rmtree(runs[1].path)
    table.refresh(wait=True)
    change = table.changes_since(change.cursor)
    assert change is not None and change.data["removed"] == [runs[1].id] and change.data["rows"] == []
    table.close()


@pytest.mark.parametrize("cursor", [None, "", "x", "00000000-1", "-", "1-²"])
def test_an_unknown_cursor_gets_everything(home: Path, cursor: str | None) -> None:
    ui_home.make_run(home, NOW, small())
    table = RunsTable()
    table.refresh(wait=True)
    change = table.changes_since(cursor)
    assert change is not None and change.data["full"] and len(change.data["rows"]) == 1
    table.close()


def test_a_run_that_ended_is_not_read_again_and_the_scheduler_is_asked_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, state in enumerate(("running", "running", "completed")):
        ui_home.make_run(home, NOW, small(f"r{i}", state), seed=i)
    table = RunsTable()
    table.refresh(wait=True)
    read: list[str] = []
    asked: list[int] = []
    one = run_status._status_or_unreadable
    query = run_status._query_jobs
    monkeypatch.setattr(run_status, "_status_or_unreadable", lambda run, a: read.append(run.id) or one(run, a))
    monkeypatch.setattr(run_status, "_query_jobs", lambda b, ids, a: asked.append(len(ids)) or query(b, ids, a))
    table.refresh(wait=True)
    assert read == [] and asked == []
    table._next_scheduler_s = 0.0
    table.refresh(wait=True)
    assert sorted(name[:2] for name in read) == ["r0", "r1"] and asked == [2]
    table.close()


def test_states_come_from_the_files_until_the_scheduler_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ui_home.make_run(home, NOW, small("a", "running"))
    table = RunsTable()
    seen: list[str | None] = []
    query = run_status.query_schedulers
    monkeypatch.setattr(
        run_status, "query_schedulers",
        lambda runs: seen.extend(row.state for row in table.document()["rows"]) or query(runs),
    )  # fmt: skip
    table.refresh(wait=True)
    assert seen == ["running"] and table.document()["scheduler"] == []
    assert table.statuses()[run.id].scheduler_error is None
    table.close()


def test_damaged_and_hostile_runs_are_rows_too(home: Path) -> None:
    good = ui_home.make_run(home, NOW, small())
    damaged = ui_home.make_run(home, NOW, small("damaged"), seed=1)
    damaged.spec.write_text("[job\n")
    hostile = home / "runs" / "<img src=x onerror=alert(1)>\x1b[31m\n"
    shutil.copytree(good.path, hostile)
    (home / "runs" / "a-file").write_text("")
    client = signed_in()
    document = client.get("/api/runs").json()
    rows = {row["run"]: row for row in document["rows"]}
    assert len(rows) == 3 and rows[damaged.id]["state"] is None and "spec.toml" in rows[damaged.id]["error"]
    assert not any("\x1b" in name for name in rows)
    page = client.get("/").text
    assert "<img src=x" not in page and "\\u003cimg src=x" in page
    name = next(name for name in rows if name.startswith("<img"))
    assert client.get(rows[name]["url"]).status_code == 200


def test_an_empty_and_a_missing_home(home: Path) -> None:
    client = signed_in()
    for _ in range(2):
        document = client.get("/api/runs").json()
        assert document["rows"] == [] and document["complete"] and document["problem"] is None
        (home / "runs").mkdir(parents=True, exist_ok=True)


def test_a_home_that_may_not_be_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise permission_error(home / "runs")

    monkeypatch.setattr(runs_table, "list_runs", refuse)
    document = signed_in().get("/api/runs").json()
    assert "you may not read it" in document["problem"] and document["rows"] == []


@pytest.mark.parametrize(
    "path",
    [
        "/runs/nothing",
        "/runs/.hidden",
        "/runs/%2e%2e%2fsecret",
        "/static/../base.html.j2",
        "/x",
        f"/runs/{'x' * 5000}",
        f"/api/live/runs/{'x' * 5000}",
    ],
)
def test_what_does_not_exist_says_so(home: Path, path: str) -> None:
    answer = signed_in().get(path)
    assert answer.status_code == 404 and "Traceback" not in answer.text


@pytest.mark.long
def test_rows_of_ended_runs_are_there_at_the_next_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = ("completed", "failed", "running")
    runs = [ui_home.make_run(home, NOW, small(f"r{i}", state), seed=i) for i, state in enumerate(states)]
    first = RunsTable()
    first.refresh(wait=True)
    rows = {row.run: row for row in first.document()["rows"]}
    first.close()
    (runs[1].path / "events" / "later.jsonl").write_text('{"t": 1.0, "event": "continued"}\n')
    seen: list[list[str]] = []
    read = RunsTable._read_runs

    def look(table: RunsTable, some: list[RunDir], answers: run_status.SchedulerAnswers | None) -> None:
        seen.append([row.run for row in table.document()["rows"]])
        assert table.statuses() == {} or len(seen) > 1
        read(table, some, answers)

    monkeypatch.setattr(RunsTable, "_read_runs", look)
    second = RunsTable()
    second.refresh(wait=True)
    assert seen[0] == [runs[0].id], "not those that run, or have changed since"
    assert {row.run: row.state for row in second.document()["rows"]} == {run: row.state for run, row in rows.items()}
    assert len(second.known_runs()) == 3
    second.close()
    for damaged in ("", "[1, 2]", '{"x": {"run": 5}}', '{"x": '):
        for file in (home.parent / "cache").rglob("*.json"):
            file.write_text(damaged)
        third = RunsTable()
        third.refresh(wait=True)
        assert len(third.document()["rows"]) == 3
        third.close()


@pytest.mark.long
@pytest.mark.usefixtures("computes_details")
def test_details_come_from_a_child_process_and_are_kept(home: Path) -> None:
    run = ui_home.make_run(home, NOW, Made("lm", steps=60, total=60, rows=60, samples=30, gpus=2, idle_gpus=1))
    table = RunsTable()
    table.refresh(wait=True)
    table.refresh(wait=True)
    assert table._details._thread is not None
    table._details._thread.join()
    found = table.document()["rows"][0].details
    assert found is not None and found.error is None and found.critical + found.warning > 0
    assert found.utilization == pytest.approx(0.93 / 2, abs=0.2) and len(found.spark) > 3
    assert found.idle_gpu_hours > 0
    table.close()
    again = RunsTable()
    again.refresh(wait=True)
    assert again.document()["rows"][0].details == found, "from the cache"
    assert not any(path.name.startswith("ui") for path in run.path.iterdir())
    again.close()


def test_a_run_whose_details_cannot_be_computed_does_not_hide_those_of_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [ui_home.make_run(home, NOW, small(f"r{i}"), seed=i) for i in range(3)]
    odd = runs[1].path.rename(Path(os.fsdecode(os.fsencode(runs[1].path) + b"\xff")))
    requests: list[details.Request] = []

    def run_child(argv: Sequence[str], data: bytes, **_: object) -> None:
        """Do what the child process does, which is killed at one run."""
        request = msgspec.json.decode(data, type=details.Request)
        requests.append(request)
        with Path(request.out).open("ab") as out:
            for i, (path, _) in enumerate(request.runs):
                if path == os.fsencode(odd):
                    raise CommandFailed("out of memory")
                out.write(msgspec.json.encode(details.Answer(i, Details(utilization=0.5))) + b"\n")

    monkeypatch.setattr(proc, "run_with_stdin", run_child)
    found: dict[str, Details] = {}
    reader = details.DetailsReader(lambda known, _: found.update({w.run.id: d for w, d in known.items()}))
    wanted = [details.Wanted(RunDir(path), None, (), True) for path in (runs[0].path, odd, runs[2].path)]
    reader._compute(wanted)
    assert found == {runs[0].id: Details(utilization=0.5), odd.name: Details(error="out of memory")}
    reader._compute(wanted[2:])
    assert found[runs[2].id].utilization == 0.5, "it comes next"

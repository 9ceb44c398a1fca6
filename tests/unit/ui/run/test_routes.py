"""The JSON that the page of a run asks for."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from clustertrain import clock, fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.run_status import Unreadable
from clustertrain.ui.run import logs as run_logs
from clustertrain.ui.run import workers
from tests.unit.report import live_runs
from tests.unit.ui.clients import signed_in

HOSTILE = "<img src=x onerror=alert(1)> \x1b[31mred\x1b[0m \x1b]52;c;AAAA\x07 \u202egnp.exe"


@pytest.fixture
def client(run: RunDir) -> TestClient:
    return signed_in()


def get(client: TestClient, path: str, **parameters: Any) -> Any:
    response = client.get(path, params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def write_log(run: RunDir, rank: int, text: str, attempt: int = 1) -> None:
    run.attempt(attempt).logs.mkdir(parents=True, exist_ok=True)
    run.attempt(attempt).rank_log(rank).write_text(text)


def test_page_has_a_tab_per_part(client: TestClient, run: RunDir) -> None:
    text = client.get(f"/runs/{run.id}").text
    for tab in ("overview", "training", "gpus", "timeline", "logs", "setup", "checkpoints"):
        assert f'id="panel-{tab}"' in text and f'href="#{tab}"' in text
    assert client.get("/runs/nothing-abc234").status_code == 404
    for path in ("/runs/%2e%2e", "/runs/..%2f..%2fetc", "/api/runs/%00"):
        assert client.get(path).status_code == 404, path


def test_page_has_the_status_unless_it_takes_long(
    client: TestClient, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clustertrain.ui.run_page.FIRST_STATUS_S", 60.0)
    assert '"state":"running"' in client.get(f"/runs/{run.id}").text
    answered = threading.Event()
    unreadable = Unreadable(run, "the scheduler is slow")
    monkeypatch.setattr("clustertrain.ui.run.status.run_statuses", lambda runs: answered.wait(60) and [unreadable])
    monkeypatch.setattr("clustertrain.ui.run_page.FIRST_STATUS_S", 0.01)
    assert '"status":null' in signed_in().get(f"/runs/{run.id}").text
    answered.set()


def test_page_names_every_module_that_it_imports(client: TestClient, run: RunDir) -> None:
    """A module that is not named in the page is one more round trip, one after another."""
    named = set(re.findall(r'href="/static/([a-z_]+\.js)"', client.get(f"/runs/{run.id}").text))
    imported: set[str] = set()
    pending = {"run.js"}
    while pending:
        name = pending.pop()
        imported.add(name)
        response = client.get(f"/static/{name}")
        assert response.status_code == 200, name
        pending |= set(re.findall(r'^import .*"\./([a-z_]+\.js)";$', response.text, re.MULTILINE)) - imported
    assert imported - {"run.js"} == named


def test_overview_has_the_keys_of_status(client: TestClient, run: RunDir) -> None:
    document = get(client, f"/api/runs/{run.id}")
    assert (document["state"], document["step"], document["total_steps"]) == ("running", 1200, 10_000)
    assert document["eta_s"] > 0 and document["nodes"] == 1 and not document["is_final"]
    assert sum(part["share"] for part in document["goodput_parts"]) == pytest.approx(1.0)
    fsio.write_json(run.plan, {"device": "cpu"})
    assert get(client, f"/api/runs/{run.id}")["device"] == "cpu"
    assert document["attempts"][0]["nodes"] == ["n1", "n2"] and document["failure"] is None


def test_failure_is_shown_with_its_last_lines(client: TestClient, run: RunDir) -> None:
    attempt = run.attempt(1)
    attempt.results.mkdir()
    error = {"type": "ValueError", "message": HOSTILE, "traceback": f"Traceback\n  line 3\n{HOSTILE}\n"}
    rank = {"rank": 3, "ending": "failed", "kind": "error", "error": error}
    fsio.write_json(attempt.result_path("n1"), {"node": "n1", "ending": "failed", "kind": "error", "ranks": [rank]})
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": clock.now(), "event": "ended", "ending": "failed", "reason": HOSTILE})
    log.append({"t": clock.now(), "event": "stopped", "reason": HOSTILE})
    log.close()
    live_runs.create_job("local-1", run, state="FAILED")
    document = get(client, f"/api/runs/{run.id}")
    assert document["state"] == "failed" and document["failure_of"] == "rank 3 on n1"
    assert document["failure"]["lines"][:2] == ["Traceback", "  line 3"]
    text = json.dumps(document, ensure_ascii=False)
    assert "\x1b" not in text and "\u202e" not in text and r"\\u202e" in text
    failures = get(client, f"/api/runs/{run.id}/logs")["failures"]
    assert failures[0]["key"] == "1/rank-3" and failures[0]["who"] == "rank 3 on n1"


def test_curves(client: TestClient, run: RunDir) -> None:
    document = get(client, f"/api/runs/{run.id}/curves", name=["loss", "nothing"])
    assert list(document["curves"]) == ["loss"] and len(document["steps"]) == 1200
    assert document["names"] == ["loss", "step_s", "tokens_per_s"]


def test_timeline(client: TestClient, run: RunDir) -> None:
    document = get(client, f"/api/runs/{run.id}/timeline")
    assert document["lanes"] == ["Starts", "Checkpoints"] and document["attempts"][0]["end"] is None
    assert {phase for _, _, phase in document["phases"]} >= {"start-up", "training"}
    assert sum(m["kind"] == "checkpoint" for m in document["marks"]) == 5


def test_run_that_waits_has_empty_parts(client: TestClient, run: RunDir) -> None:
    shutil.rmtree(run.attempts_folder)
    shutil.rmtree(run.metrics)
    live_runs.create_job("local-1", run, state="PENDING", reason="Priority")
    document = get(client, f"/api/runs/{run.id}")
    assert (document["state"], document["pending_reason"], document["attempts"]) == ("pending", "Priority", [])
    timeline = get(client, f"/api/runs/{run.id}/timeline")
    assert timeline["attempts"] == timeline["marks"] == timeline["phases"] == []
    assert get(client, f"/api/runs/{run.id}/curves")["steps"] == []
    assert get(client, f"/api/runs/{run.id}/logs")["attempts"] == []
    for part in ("setup", "checkpoints"):
        get(client, f"/api/runs/{run.id}/{part}")


def test_logs_are_listed_and_read_in_parts(client: TestClient, run: RunDir) -> None:
    write_log(run, 0, "".join(f"line {i}\n" for i in range(2000)))
    write_log(run, 10, "ten\n")
    (run.attempt(1).logs / "agent-n1.log").write_text("torchrun\n")
    listed = get(client, f"/api/runs/{run.id}/logs")
    (attempt,) = listed["attempts"]
    assert [r["key"] for r in attempt["ranks"]] == ["1/rank-0", "1/rank-10"] and listed["job"]["size"] is None
    assert attempt["agents"] == [{"key": "1/agent-n1", "node": "n1", "size": 9}]
    lines = f"/api/runs/{run.id}/logs/lines"
    last = get(client, lines, key="1/rank-0", count=3)
    assert [text for _, text in last["lines"]] == ["line 1997", "line 1998", "line 1999"]
    before = get(client, lines, key="1/rank-0", before=last["start"], count=2)
    assert [text for _, text in before["lines"]] == ["line 1995", "line 1996"]
    following = get(client, lines, key="1/rank-0", after=before["start"], count=3)
    assert [text for _, text in following["lines"]] == ["line 1995", "line 1996", "line 1997"]
    assert get(client, lines, key="1/agent-n1")["lines"] == [[0, "torchrun"]]
    assert get(client, lines, key="1/rank-99")["exists"] is False


@pytest.mark.parametrize(
    "key", ["", "1/../../spec", "1/rank-0/../x", "7/rank-0", "1/agent-../../../spec", "1/agent-a/b"]
)
def test_no_other_file_can_be_read(client: TestClient, run: RunDir, key: str) -> None:
    response = client.get(f"/api/runs/{run.id}/logs/lines", params={"key": key})
    assert response.status_code == 404 and "has no log" in response.json()["error"]


def test_hostile_line_is_harmless_text(client: TestClient, run: RunDir) -> None:
    write_log(run, 0, f"{HOSTILE}\n 10%\r 20%\n")
    lines = get(client, f"/api/runs/{run.id}/logs/lines", key="1/rank-0")["lines"]
    assert lines[0][1] == r"<img src=x onerror=alert(1)> red \x1b]52;c;AAAA\x07 \u202egnp.exe"
    assert lines[1][1] == " 20%"


def test_new_lines_continue_the_log_and_a_replaced_log_restarts(run: RunDir) -> None:
    write_log(run, 0, "one\ntwo\nthr")
    path = run.attempt(1).rank_log(0)
    page = run_logs.read_lines(run, "1/rank-0", count=10, before=None, after=None)
    topic = run_logs.LogTopic(path)
    assert not topic.refresh() and topic.changes_since(page["cursor"]) is None
    with path.open("a") as f:
        f.write("ee\nfour\n")
    assert topic.refresh()
    change = topic.changes_since(page["cursor"])
    assert change is not None and change.data["lines"] == [[8, "three"], [14, "four"]] and not change.data["restart"]
    path.write_text("new\n")
    restarted = topic.changes_since(change.cursor)
    assert restarted is not None and restarted.data["restart"] and restarted.data["lines"] == [[0, "new"]]


def test_page_far_behind_continues_with_the_newest_lines(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logs, "MAX_BEHIND_BYTES", 100)
    write_log(run, 0, "".join(f"line {i}\n" for i in range(2000)))
    change = run_logs.LogTopic(run.attempt(1).rank_log(0)).changes_since("7-7")
    assert change is not None and change.data["restart"] and change.data["lines"][-1][1] == "line 1999"
    assert len(change.data["lines"]) == 500


@pytest.mark.long
def test_search_over_all_ranks_and_in_one_log(client: TestClient, run: RunDir) -> None:
    write_log(run, 0, "step 1 loss 3\nstep 2 loss NaN\n")
    write_log(run, 1, f"step 2 loss nan {HOSTILE}\n")
    search = f"/api/runs/{run.id}/logs/search"
    found = get(client, search, text="LOSS nan")
    assert [(m["key"], m["offset"]) for m in found["matches"]] == [("1/rank-0", 14), ("1/rank-1", 0)]
    assert found["complete"] and "\x1b" not in json.dumps(found)
    one = get(client, search, text=r"^step \d loss [a-z]+\b", regex="1", key="1/rank-1")
    assert [m["key"] for m in one["matches"]] == ["1/rank-1"]
    for parameters in ({"text": "(", "regex": "1"}, {"text": ""}, {"text": "x" * 2000}):
        assert client.get(search, params=parameters).status_code == 400
    assert client.get(search, params={"text": "x", "key": "1/../spec"}).status_code == 404


@pytest.mark.long
def test_endless_regular_expression_is_ended(client: TestClient, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(run, 0, "a" * 40 + "b\n")
    monkeypatch.setattr(workers, "SEARCH_TIMEOUT_S", 1.0)
    monkeypatch.setattr(workers, "_START_S", 0.0)
    response = client.get(f"/api/runs/{run.id}/logs/search", params={"text": "^(a+)+$", "regex": "1"})
    assert response.status_code == 500 and "did not end within" in response.json()["error"]
    assert "the search did not finish" in response.json()["error"] and response.json()["fix"]


def test_setup_has_recipe_plan_code_and_no_secret(client: TestClient, run: RunDir) -> None:
    run.spec.write_text(
        '[job]\nbackend = "local"\n[env]\nHF_HOME = "/private"\n[recipe.data]\ntokenizer = "gpt2"\n'
        '[recipe.telemetry.alerts]\nwebhook = "https://hooks.example/abc"\n'
    )
    git = {"commit": "0123abc", "branch": "main", "dirty": True, "diff": "+x = 1"}
    record = {"argv": ["clustertrain", "submit", "a b.toml"], "user": "eve\x1b[31m", "git": git, "python": "3.12.1"}
    fsio.write_json(run.record, record)
    fsio.write_json(run.plan, {"layout": {"strategy": "fsdp"}, "reasons": ["fits"], "nccl": {"NCCL_X": {"value": "1"}}})
    document = get(client, f"/api/runs/{run.id}/setup")
    assert document["submission"]["command"] == "clustertrain submit 'a b.toml'"
    assert document["code"]["dirty"] and document["code"]["diff"] == "+x = 1"
    assert document["environment"] == ["HF_HOME"] and 'tokenizer = "gpt2"' in document["recipe"]
    assert document["recipe_title"] == "Recipe"
    text = json.dumps(document)
    assert "/private" not in text and "hooks.example" not in text and "\x1b" not in text
    assert document["plan"]["reasons"] == ["fits"] and document["nodes"][0]["nodes"] == ["n1", "n2"]


def test_setup_of_a_script_shows_no_recipe(client: TestClient, run: RunDir) -> None:
    run.spec.write_text('[job]\nbackend = "local"\n[script]\npath = "train.py"\n')
    document = get(client, f"/api/runs/{run.id}/setup")
    assert document["recipe_title"] == "Job and script" and "train.py" in document["recipe"]


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe", b"[1, 2]", b'{"argv": {"a": 1}, "git": [], "nccl": [], "env": 5}']
)
def test_damaged_files_are_named_and_the_rest_is_shown(client: TestClient, run: RunDir, damage: bytes) -> None:
    run.record.write_bytes(damage)
    run.plan.write_bytes(damage)
    run.metrics_path(1).write_bytes(damage)
    document = get(client, f"/api/runs/{run.id}/setup")
    assert document["recipe"] and document["submission"]["command"] is None
    assert bool(document["errors"]) == damage.startswith((b"\xff", b"[")), document["errors"]
    for part in ("", "/curves", "/timeline", "/logs", "/checkpoints"):
        get(client, f"/api/runs/{run.id}{part}")


def test_unreadable_specification_is_named(client: TestClient, run: RunDir) -> None:
    run.spec.write_bytes(b"job = [")
    assert "spec.toml" in get(client, f"/api/runs/{run.id}")["error"]
    assert any("spec.toml" in e for e in get(client, f"/api/runs/{run.id}/setup")["errors"])


def test_checkpoints(client: TestClient, run: RunDir) -> None:
    assert get(client, f"/api/runs/{run.id}/checkpoints")["rows"] == []
    for step in (100, 200):
        folder = run.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x" * step)
    (folder / "COMMITTED").write_text("")
    rows = get(client, f"/api/runs/{run.id}/checkpoints")["rows"]
    assert [r["step"] for r in rows] == [200, 100] and rows[1]["state"] == "not committed"
    assert rows[0]["state"] == "DAMAGED" and rows[0]["t"] is not None, "it has no manifest"


@pytest.mark.long
def test_telemetry_is_computed_in_a_child_process(client: TestClient, run: RunDir) -> None:
    live_runs.record(run, "n1", clock.now())
    document = get(client, f"/api/runs/{run.id}/telemetry")
    assert [g["label"] for g in document["data"]["gpus"]] == [f"n1:{i}" for i in range(8)]
    assert document["gpu_table"]["rows"][0]["cells"][0]["text"].startswith("n1:") and document["blob"]
    assert all(piece["text"] for n in document["insights"] for piece in n["text"]) and document["insights"]


def test_parameters_are_checked(client: TestClient, run: RunDir) -> None:
    response = client.get(f"/api/runs/{run.id}/logs/lines", params={"key": "job", "before": "-5"})
    assert response.status_code == 400 and "is not a number" in response.json()["error"]


def test_failure_of_the_file_system_is_no_defect(run: RunDir) -> None:
    write_log(run, 0, "")
    signed = signed_in()
    client = TestClient(signed.app, base_url=str(signed.base_url), cookies=dict(signed.cookies))  # raises defects
    response = client.get(f"/api/runs/{run.id}/logs/lines", params={"key": "1/agent-" + "x" * 255})
    assert response.status_code == 500 and "File name too long" in response.json()["error"], response.text


def test_device_in_place_of_a_record_of_checkpoints_is_named(client: TestClient, run: RunDir) -> None:
    (run.checkpoints / "step-00000100").mkdir(parents=True)
    (run.checkpoints / "rolled-back.json").symlink_to("/dev/null")  # /dev/zero would never end
    document = get(client, f"/api/runs/{run.id}/checkpoints")
    assert [row["step"] for row in document["rows"]] == [100]
    assert "rolled-back.json: is a device" in document["damage"][0]


@pytest.mark.long
def test_run_in_a_folder_that_is_not_utf_8(
    client: TestClient, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    (home / "runs").mkdir(parents=True)
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(home))
    moved = RunDir(run.path.rename(home / "runs" / run.id))
    write_log(moved, 0, "a needle\n")
    live_runs.record(moved, "n1", clock.now())
    assert get(client, f"/api/runs/{run.id}/logs/search", text="needle")["matches"]
    assert get(client, f"/api/runs/{run.id}/telemetry")["data"]["gpus"]

"""What status, list, open and version show of a run, in a terminal and as JSON."""

from __future__ import annotations

import json
import os
import shutil
import time
import webbrowser
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click import Command
from click.testing import CliRunner, Result

from clustertrain import clock, fsio
from clustertrain.cli.checkpoint import checkpoint
from clustertrain.cli.jobs import list_, status
from clustertrain.cli.open import open_
from clustertrain.cli.version import version
from clustertrain.errors import ConfigError, NotFound, UsageError
from clustertrain.run.run_dir import RunDir
from clustertrain.submit.preflight import filesystem
from tests.unit.report import live_runs

pytestmark = pytest.mark.long
SPEC = '[job]\nbackend = "local"\nnodes = 2\ngpus = 4\n'
NOW = time.time()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run in step 1200 of 10000, at 0.5 s per step, with a checkpoint of step 1000 two minutes ago."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "now", lambda: NOW)
    run = live_runs.new_run(tmp_path, NOW, spec=SPEC)
    live_runs.begin(run, NOW, ["a", "b"])
    live_runs.create_job("local-1", run)
    checkpoint = run.checkpoints / "step-00001000"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").write_text("x")
    os.utime(checkpoint / "COMMITTED", (NOW - 125, NOW - 125))
    return run


def call(command: Command, *argv: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(command, argv, standalone_mode=False)


def end(run: RunDir) -> None:
    """Let rank 5 fail, and end the job."""
    error = {"type": "ValueError", "message": "no column", "traceback": "Traceback\n  line 3\nValueError: no column\n"}
    rank = {"rank": 5, "ending": "failed", "kind": "error", "error": error}
    run.attempt(1).results.mkdir()
    fsio.write_json(
        run.attempt(1).result_path("b"), {"node": "b", "ending": "failed", "kind": "error", "ranks": [rank]}
    )
    log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
    reason = "rank 5 on b: ValueError: no column"
    log.append({"t": NOW, "event": "ended", "ending": "failed", "reason": reason})
    log.append({"t": NOW, "event": "stopped", "reason": reason})
    log.close()
    live_runs.create_job("local-1", run, state="FAILED")


@pytest.mark.parametrize(
    ("git", "shown"),
    [
        ({"commit": "ab" * 20, "branch": "main", "dirty": True}, "commit ababababab on main, with uncommitted changes"),
        ({"commit": "ab" * 20, "branch": None, "dirty": False}, "commit ababababab"),
        ({"commit": "ab" * 20, "branch": "\x1b[31mred"}, r"commit ababababab on \x1b[31mred"),
        (None, None),
        ({"commit": 7}, None),
    ],
)
def test_status_shows_the_commit_of_the_code(run: RunDir, git: object, shown: str | None) -> None:
    fsio.write_json(run.record, {"git": git})
    rows = [line.split(maxsplit=1) for line in call(status, run.id).stdout.splitlines()]
    assert next((row[1] for row in rows if row and row[0] == "code"), None) == shown


def test_status_leads_with_progress_loss_and_checkpoint(run: RunDir) -> None:
    lines = [line.split(maxsplit=1) for line in call(status, run.id).stdout.splitlines() if line]
    shown = {line[0]: line[1] for line in lines[:6] if len(line) == 2}
    assert shown["state"] == "running"
    assert shown["step"] == "1200/10000 (12%), 500 ms per step, 1h14m left"
    assert shown["loss"] == "1.143, 1,050,000 tokens/s" and shown["checkpoint"] == "step 1000, 2m05s ago"


def test_checkpoint_of_a_framework_is_shown_like_one_of_clustertrain(run: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(run.checkpoints)
    saved = tmp_path / "program" / "step-1100"
    saved.mkdir(parents=True)
    os.utime(saved, (NOW - 65, NOW - 65))
    log = fsio.JsonlAppender(run.attempt(1).events_path("rank-0"))
    log.append({"t": NOW - 65, "event": "checkpoint", "step": 1100, "path": str(saved)})
    log.close()
    assert "checkpoint  step 1100, 1m05s ago" in call(status, run.id).stdout
    assert json.loads(call(status, run.id, "--json").stdout)["checkpoint_step"] == 1100
    listed = call(checkpoint, "list", run.id)
    assert listed.stderr == f"no checkpoints in {run.checkpoints}; the program saves its own, the newest in {saved}\n"
    with pytest.raises(NotFound, match="its program saves its own, the newest in"):
        raise call(checkpoint, "digest", run.id).exception or AssertionError
    saved.rmdir()
    assert "checkpoint  step 1100\n" in call(status, run.id).stdout


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_list_shows_age_progress_time_left_loss_and_size(run: RunDir, columns: int) -> None:
    titles, row = call(list_, columns=columns).stdout.splitlines()
    shown = dict(zip(titles.split(), row.replace("2 x 4", "2x4").split(), strict=False))
    assert len(titles) <= columns and len(row) <= columns
    expected = {"run": run.id, "state": "running", "age": "1h06m", "step": "1200/10000", "left": "1h14m"}
    if columns > 60:
        expected |= {"loss": "1.143", "gpus": "2x4"}
    assert expected.items() <= shown.items()


def test_json_has_the_progress(run: RunDir) -> None:
    (row,) = json.loads(call(list_, "--json").stdout)["runs"]
    assert (row["nodes"], row["gpus_per_node"], row["checkpoint_step"]) == (2, 4, 1000)
    assert row["submitted_unix_s"] == round(NOW - 4000, 3) and row["checkpoint_unix_s"] == pytest.approx(NOW - 125)
    assert row["eta_s"] == pytest.approx(4400, rel=0.03) and row["loss"] == pytest.approx(8 / 7)
    assert row["failure"] is None
    assert json.loads(call(status, run.id, "--json").stdout).keys() > row.keys() - {"recipe_hash"}


def alert(t: float, text: str, state: str = "raised", **fields: object) -> dict[str, object]:
    names = {"code": text.partition(" ")[0], "node": "b", "uuid": None, "rank": None, "severity": "warning"}
    return {"t": t, "event": "alert", "state": state, "text": text, **names, **fields}


def test_status_of_a_running_run_shows_its_alerts_until_they_are_cleared(run: RunDir) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("agent-b"))
    log.append(alert(NOW - 90, "hot GPU 3", rank=3), alert(NOW - 80, "slow rank 5", rank=5))
    log.append(alert(NOW - 70, "hot GPU 3", rank=3, state="cleared"), alert(NOW - 60, "hot GPU 3: 91 °C", rank=3))
    log.append(alert(NOW - 50, "lost GPU 1\x1b]0;x\x07", severity="critical"))
    assert [
        line.strip() for line in call(status, run.id).stdout.splitlines() if "alert" in line or "more:" in line
    ] == ["alert       critical: lost GPU 1\\x1b]0;x\\x07", "alert       warning: hot GPU 3: 91 °C",
          "alert       warning: slow rank 5"]  # fmt: skip
    alerts = json.loads(call(status, run.id, "--json").stdout)["alerts"]
    assert [(a["severity"], a["rank"], round(NOW - a["time_unix_s"])) for a in alerts] == [
        ("critical", None, 50), ("warning", 3, 60), ("warning", 5, 80)
    ]  # fmt: skip
    log.append(*(alert(NOW - 40 + i, f"rule-{i} broken") for i in range(3)))
    log.close()
    assert f"and 3 more: clustertrain top {run.id}" in call(status, run.id).stdout
    end(run)
    live_runs.create_job("local-1", run, "FAILED")
    assert "alert" not in call(status, run.id).stdout


def test_failed_run_shows_the_end_of_the_traceback_and_the_log(run: RunDir) -> None:
    end(run)
    out = call(status, run.id, columns=160).stdout
    assert "step        1200/10000 (12%), 500 ms per step\n" in out  # no time left
    block = out.partition("Last lines of rank 5 on b\n")[2].splitlines()
    assert block[:3] == ["  Traceback", "    line 3", "  ValueError: no column"]
    assert block[3] == f"full log: {run.attempt(1).rank_log(5)}"
    assert out.count("rank 5 on b: ValueError: no column") == 1
    (row,) = json.loads(call(list_, "--json").stdout)["runs"]
    assert row["failure"]["rank"] == 5 and row["failure"]["reason"] == "ValueError: no column"


@pytest.mark.parametrize(
    "row",
    [
        {"step_s": float("inf")},
        {"step_s": float("nan"), "loss": float("nan")},
        {"loss": 10**400, "tokens_per_s": 10**400, "step_s": 10**400},
        {"step_s": -5.0},
        {"step": "many", "t": "now"},
    ],
)
def test_damaged_row_does_not_hide_the_run(run: RunDir, row: dict[str, Any]) -> None:
    with run.metrics_path(1).open("a") as f:
        f.write(json.dumps({"step": 1201, "t": NOW, **row}) + "\n")
    assert call(list_).exit_code == 0 and run.id in call(list_).stdout
    result = call(status, run.id)
    (step,) = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert result.exit_code == 0 and "-" not in step and "e+" not in step


def test_rows_before_a_rollback_are_read_if_there_are_none_since(run: RunDir) -> None:
    run.metrics_path(1, 1).write_text("")
    (row,) = json.loads(call(list_, "--json").stdout)["runs"]
    assert row["loss"] == pytest.approx(8 / 7)


def test_run_deleted_meanwhile_is_listed_without_progress(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from clustertrain.report import progress

    def delete(_: object) -> None:
        raise NotFound("spec.toml is gone")

    monkeypatch.setattr(progress, "load_spec", delete)
    assert run.id in call(list_).stdout


def test_watching_needs_a_terminal(run: RunDir) -> None:
    assert isinstance(call(status, run.id, "--watch").exception, UsageError)


def test_page_opens_where_there_is_a_browser(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    page = run.path / "report.html"
    assert call(open_, run.id).stdout == f"{page}\n" and run.id in page.read_text() and opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    call(open_, run.id, "--no-browser")
    assert opened == []
    call(open_, run.id, "--output", str(tmp_path / "mine.html"))
    assert opened == [(tmp_path / "mine.html").as_uri()]


def test_page_is_uploaded_to_an_object_store(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://bucket/{run.id}.html"
    done = call(open_, run.id, "-o", url)
    assert done.stdout == f"{url}\n" and not (run.path / "report.html").exists()
    store = fsspec.filesystem("memory")
    assert run.id.encode() in store.cat(f"/bucket/{run.id}.html")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no such key id")

    monkeypatch.setattr(type(store), "pipe_file", refuse)
    monkeypatch.setattr(type(store), "_open", refuse)
    error = call(open_, run.id, "-o", url).exception
    assert isinstance(error, ConfigError) and "no such key id" in error.message and "credentials" in error.fix
    assert isinstance(call(open_, run.id, "-o", "nope://x").exception, ConfigError)


def test_version_has_what_a_bug_report_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("CLUSTERTRAIN_WEBHOOK", "https://secret.example")
    assert call(version).stdout.split()[0] == "clustertrain" and len(call(version).stdout.splitlines()) == 1
    facts = json.loads(call(version, "--json").stdout)
    assert (
        facts["home"] == str(tmp_path)
        and facts["packages"]["torch"].startswith("2.")
        and "secret" not in json.dumps(facts)
    )
    assert {"python", "system", "cpus", "slurm", "gpus", "profile"} <= facts.keys()
    (tmp_path / "on").mkdir()
    (tmp_path / "mounts").write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path}/on rw - nfs4 x rw\n")
    monkeypatch.setattr(filesystem, "_MOUNTINFO", tmp_path / "mounts")
    text = call(version, "-v").stdout
    assert f"home           {tmp_path}\n" in text and "filesystem     ext4 (a disk of this machine)\n" in text
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "on" / "runs"))
    assert "filesystem     nfs4\n" in call(version, "-v").stdout
    assert json.loads(call(version, "--json").stdout)["home_filesystem"] == "nfs4"
    assert "nccl" in facts["packages"]

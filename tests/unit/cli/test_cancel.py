"""``cancel`` of several local runs, one of which this machine cannot end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.cli.main import main
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.local import JobFolder, LocalJob, job_folder
from tests.unit.report.live_runs import begin, new_run


def make_running_run(home: Path, name: str, job_id: str, host: str) -> tuple[RunDir, JobFolder]:
    now = time.time()
    run = new_run(home, now, name=name)
    (run.events / "submit.jsonl").unlink()
    log = fsio.JsonlAppender(run.events / "submit.jsonl")
    log.append({"t": now - 60, "event": "submitted", "job_id": job_id, "backend": "local"})
    log.close()
    begin(run, now, ["local0"], steps=3)
    fsio.write_json(
        run.attempt(1).record, {"job_id": job_id, "restart": 0, "nodes": ["local0"], "host": host, "t": now}
    )
    folder = job_folder(job_id)
    folder.path.mkdir(parents=True)
    # A job without a process id counts as about to start on any machine.
    folder.write(LocalJob(job_id=job_id, run_dir=str(run.path), state="RUNNING", pid=1 if host else 0, host=host))
    return run, folder


def test_run_on_another_machine_does_not_block_cancelling_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote, _ = make_running_run(tmp_path, "far-abc234", "local-1", "elsewhere")
    local, job = make_running_run(tmp_path, "near-abc234", "local-2", "")
    monkeypatch.setattr(sys, "argv", ["clustertrain", "cancel", "--json", remote.id, local.id])
    assert main() == 0
    out, err = capsys.readouterr()
    assert {row["run"]: row["state"] for row in json.loads(out)["runs"]} == {
        remote.id: "cancelling",
        local.id: "cancelling",
    }
    assert "runs on elsewhere" in err and f"repeat: clustertrain cancel {remote.id}\n" in err
    assert job.cancel_file.exists()


def test_second_cancel_says_that_the_run_is_being_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_running_run(tmp_path, "near-abc234", "local-2", "")
    monkeypatch.setattr(sys, "argv", ["clustertrain", "cancel", run.id])
    assert main() == 0
    assert capsys.readouterr() == (f"{run.id}: cancelling\n", "")
    assert main() == 0
    out, err = capsys.readouterr()
    assert out == f"{run.id}: cancelling\n" and f"note: {run.id} was being cancelled already" in err
    for command in ("status", "list"):
        monkeypatch.setattr(sys, "argv", ["clustertrain", command])
        assert main() == 0
        assert "cancelling" in capsys.readouterr().out

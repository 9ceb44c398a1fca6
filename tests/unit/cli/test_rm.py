"""Deletion of runs: only ended ones, and checkpoints only on request."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from clustertrain import fsio
from clustertrain.cli.rm import rm
from clustertrain.errors import ClusterTrainError, UsageError
from clustertrain.run import lookup
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.local import job_folder
from tests.unit.report import live_runs

DAY = 86400.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return tmp_path


def new_run(home: Path, name: str, *, days: float = 1.0, checkpoint: bool = False, state: str = "FAILED") -> RunDir:
    run, job_id = live_runs.new_run(home, time.time(), name=name), f"local-{len(lookup.list_runs()) + 1}"
    (run.events / "submit.jsonl").unlink()
    log = fsio.JsonlAppender(run.events / "submit.jsonl")
    log.append({"t": time.time() - days * DAY, "event": "submitted", "job_id": job_id, "backend": "local"})
    log.close()
    live_runs.create_job(job_id, run, state=state)
    if checkpoint:
        folder = run.checkpoints / "step-00000010"
        folder.mkdir(parents=True)
        (folder / "rank-0.bin").write_bytes(b"x" * 100_000)
        (folder / "COMMITTED").write_text("x")
    if state != "RUNNING":
        end(run, days)
    return run


def end(run: RunDir, days: float, ending: str = "failed") -> None:
    """Record an attempt that ended ``days`` ago, since when no file was written."""
    t, attempt = time.time() - days * DAY, run.attempt(1)
    attempt.path.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": "local-1", "restart": 0, "nodes": ["a"], "host": "a", "t": t})
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": t, "event": "ended", "ending": ending, "reason": "x"})
    log.append({"t": t, "event": "stopped", "reason": "x"})
    log.close()
    for path in run.path.rglob("*"):
        os.utime(path, (t, t))


def call(*argv: str, answer: str = "") -> Result:
    return CliRunner().invoke(rm, argv, standalone_mode=False, input=answer)


def test_ended_run_is_deleted_after_a_question(home: Path) -> None:
    run = new_run(home, "net-abc234")
    assert call(run.id, answer="n\n").return_value == 1 and run.path.exists()
    assert call(run.id, answer="y\n").return_value == 0 and not run.path.exists()
    assert list((home / "runs").iterdir()) == []


def test_running_run_is_refused_with_all_others(home: Path) -> None:
    ended, running = new_run(home, "net-abc234"), new_run(home, "net-xyz567", state="RUNNING")
    error = call(ended.id, running.id, "--yes", "--checkpoints").exception
    assert isinstance(error, ClusterTrainError) and f"clustertrain cancel {running.id}" in str(error)
    assert ended.path.exists() and running.path.exists() and error.fix == "leave out the runs that are kept"


def test_checkpoint_is_deleted_only_on_request(home: Path) -> None:
    run = new_run(home, "net-abc234", checkpoint=True)
    error = call(run.id, "--yes").exception
    assert isinstance(error, ClusterTrainError) and error.message.endswith("is kept: it has a checkpoint of step 10")
    assert error.fix == "add --checkpoints"
    dry = call(run.id, "--checkpoints", "--dry-run", "--json")
    (row,) = json.loads(dry.stdout)["runs"]
    assert row["run"] == run.id and 100_000 <= row["bytes"] < 1_000_000 and row["deleted"] is False
    assert run.path.exists()
    assert call(run.id, "--checkpoints", "--yes").return_value == 0 and not run.path.exists()


def test_checkpoints_outside_of_the_run_stay(home: Path) -> None:
    run = new_run(home, "net-abc234")
    elsewhere = home / "elsewhere"
    (elsewhere / "step-00000010").mkdir(parents=True)
    (elsewhere / "step-00000010" / "COMMITTED").write_text("x")
    if run.checkpoints.exists():
        run.checkpoints.rmdir()
    run.checkpoints.symlink_to(elsewhere)
    assert call(run.id, "--yes").return_value == 0
    assert not run.path.exists() and (elsewhere / "step-00000010" / "COMMITTED").exists()


def test_old_runs_are_selected_by_age_and_others_stay(home: Path) -> None:
    old, new = new_run(home, "old-abc234", days=40), new_run(home, "new-abc234", days=2)
    kept = new_run(home, "kept-abc234", days=40, checkpoint=True)
    result = call("--older-than", "30d", "--yes")
    assert result.return_value == 0 and f"{kept.id}: kept: it has a checkpoint" in result.stderr
    assert [run.path.exists() for run in (old, new, kept)] == [False, True, True]


def test_unreadable_run_is_not_deleted(home: Path) -> None:
    run = new_run(home, "net-abc234")
    run.spec.write_text("version = [\n")
    error = call(run.id, "--yes", "--checkpoints").exception
    assert isinstance(error, ClusterTrainError) and f"delete {run.path} yourself" in str(error) and run.path.exists()


def test_long_run_that_ended_just_now_is_not_old(home: Path) -> None:
    run = new_run(home, "long-abc234", days=40, checkpoint=True)
    (run.checkpoints / "step-00000010" / "COMMITTED").write_text("y")  # saved just now
    result = call("--older-than", "30d", "--checkpoints", "--yes")
    assert result.return_value == 0 and run.path.exists()


def test_failed_deletion_is_reported_and_leaves_no_run_in_the_lists(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_run(home, "one-abc234"), new_run(home, "two-abc234")
    rmtree = shutil.rmtree

    def fail(path: Path) -> None:
        if "one" in path.name:
            raise OSError(39, "Directory not empty", str(path / "x"))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", fail)
    result = call(first.id, second.id, "--yes")
    assert result.return_value == 1 and f"the rest is in {home}/runs/.{first.id}.deleted" in result.stderr
    assert lookup.list_runs() == [] and not second.path.exists()


def test_run_that_is_continued_while_the_user_thinks_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(home, "net-abc234")

    def confirm(*_: object, **__: object) -> bool:
        live_runs.create_job("local-1", run, state="RUNNING")
        (run.attempt(2).path).mkdir()
        return True

    monkeypatch.setattr("click.confirm", confirm)
    result = call(run.id)
    assert result.return_value == 1 and run.path.exists() and "kept: it is running" in result.stderr


def test_submission_in_progress_is_not_deleted(home: Path) -> None:
    run = live_runs.new_run(home, time.time(), name="sub-abc234")
    (run.events / "submit.jsonl").unlink()
    error = call(run.id, "--yes").exception
    assert isinstance(error, ClusterTrainError) and "its end is not recorded" in str(error) and run.path.exists()


@pytest.mark.parametrize("name", ["model.pt", "out"])
def test_files_of_the_program_are_deleted_only_on_request(home: Path, name: str) -> None:
    run = new_run(home, "net-abc234")
    (run.path / name).mkdir()
    error = call(run.id, "--yes").exception
    assert isinstance(error, ClusterTrainError) and f"its program has written {name}" in str(error)
    assert call(run.id, "--yes", "--checkpoints").return_value == 0


def test_linked_folder_is_not_deleted(home: Path) -> None:
    run = new_run(home, "net-abc234")
    run.path.rename(home / "elsewhere")
    run.path.symlink_to(home / "elsewhere")
    error = call(run.id, "--yes").exception
    assert isinstance(error, ClusterTrainError) and "its folder is a link" in str(error) and run.path.is_symlink()


def test_sweep_goes_with_its_last_run(home: Path) -> None:
    runs = [new_run(home, f"net-abc23{i}") for i in range(2)]
    sweep = home / "sweeps" / "net-xyz567"
    (sweep / "code").mkdir(parents=True)
    (sweep / "code" / "train.py").write_text("x" * 100_000)
    for i, run in enumerate(runs):
        (sweep / str(i)).symlink_to(f"../../runs/{run.id}")
    first = call(runs[0].id, "--yes")
    assert "sweep" not in first.stdout and (sweep / "code" / "train.py").exists()
    shown = call(runs[1].id, "--dry-run").stdout
    assert re.search(rf"sweep {sweep.name}  1\d\d\.\d KiB", shown) and sweep.exists(), shown
    assert call(sweep.name, "--yes").return_value == 0
    assert not sweep.exists() and not runs[1].path.exists()


def test_records_of_local_jobs_are_removed_but_ids_are_not_used_again(home: Path) -> None:
    runs = [new_run(home, f"net-abc23{i}") for i in range(3)]
    assert sorted(p.name for p in (home / "local").iterdir()) == ["2", "3", "4"]
    assert call(runs[0].id, runs[2].id, "--yes").return_value == 0
    # The newest stays, or the next job would be local-4 again.
    assert sorted(p.name for p in (home / "local").iterdir()) == ["3", "4"]


def test_job_for_which_another_one_waits_keeps_its_record(home: Path) -> None:
    run, other = new_run(home, "net-abc234"), new_run(home, "net-xyz567", state="RUNNING")
    record = job_folder("local-3")
    job = record.read()
    assert job is not None and job.run_dir == str(other.path)
    record.write(msgspec.structs.replace(job, depends_on="local-2"))
    assert call(run.id, "--yes").return_value == 0 and job_folder("local-2").path.exists()


def test_entries_of_wrap_are_removed(home: Path) -> None:
    runs = [new_run(home, f"net-abc23{i}") for i in range(2)]
    folder = home / "wrapped" / "big-4711"
    folder.mkdir(parents=True)
    for i, run in enumerate(runs, 1):
        fsio.write_json(folder / f"{i}.json", {"run": run.id})
    fsio.write_json(folder / "start-0-0.json", {"run": runs[0].id})
    (folder / "9.json").write_text("{")
    assert call(runs[0].id, "--yes").return_value == 0
    assert sorted(p.name for p in folder.iterdir()) == ["2.json", "9.json", "start-0-0.json"]
    (folder / "9.json").unlink()
    assert call(runs[1].id, "--yes").return_value == 0 and not folder.exists()


@pytest.mark.parametrize(
    "argv", [(), ("net", "--older-than", "30d"), ("--older-than", "long"), ("--older-than", "30"), ("net", "--json")]
)
def test_selection_has_to_be_clear(argv: tuple[str, ...]) -> None:
    assert isinstance(call(*argv).exception, UsageError)


def test_without_an_answer_nothing_is_deleted_and_the_option_is_named(home: Path) -> None:
    run = new_run(home, "net-abc234")
    error = call(run.id).exception  # standard input is empty, as in a batch job
    assert isinstance(error, ClusterTrainError) and "add --yes" in str(error) and run.path.exists()

"""Checkpoints that a command saves by itself: found by a pattern, resumed from, and counted as progress."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.agent.ranks import program_checkpoints
from clustertrain.agent.ranks.program_checkpoints import ProgramCheckpoints
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.run import attempts, events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run-abc234")
    (run.path / "attempts").mkdir(parents=True)
    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "work [1]" / "out"
    folder.mkdir(parents=True)
    return folder


def begin(run: RunDir, out: Path, n: int, pattern: str = "out/*.pt") -> tuple[str, ProgramCheckpoints]:
    """Begin attempt ``n`` of a command; return what it resumes from."""
    (run.path / "attempts" / str(n)).mkdir()
    script = ScriptSpec(cwd=str(out.parent), command=("python", "train.py"))
    watched = ProgramCheckpoints(run, run.attempt(n), RunSpec(job=JobSpec(checkpoints=pattern), script=script))
    return watched.begin(), watched


def save(path: Path, t: float, *, whole: bool = True) -> str:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", "x" * 1000)
    if not whole:
        path.write_bytes(path.read_bytes()[:500])
    os.utime(path, (t, t))
    return str(path)


def made_progress(run: RunDir) -> list[bool]:
    return [attempt.made_progress for attempt in attempts.load_attempts(run)]


def test_newest_whole_checkpoint_of_the_run_is_chosen(
    run: RunDir, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(out / "of-another-run.pt", 100.0)
    chosen, first = begin(run, out, 1)
    assert chosen == ""
    older = save(out / "older.pt", 200.0)
    save(out / "newest.pt", 300.0, whole=False)
    (out / "empty.pt").touch()
    save(out / "other.txt", 400.0)
    first.end()
    chosen, second = begin(run, out, 2)
    assert chosen == older
    printed = capfd.readouterr().err
    assert f"skipping checkpoint {out}/newest.pt: it ends too early" in printed
    assert f"skipping checkpoint {out}/empty.pt: it is empty" in printed
    second.end()
    assert made_progress(run) == [True, False]
    save(out / "of-another-run.pt", 500.0)  # overwritten by this one
    assert begin(run, out, 3)[0] == str(out / "of-another-run.pt")
    assert [a.newest_checkpoint for a in attempts.load_attempts(run)][:2] == [older, older]
    assert made_progress(run) == [True, True, False]  # attempt 2 was killed before it had seen it


def test_checkpoints_are_found_while_the_command_runs(run: RunDir, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_checkpoints, "INTERVAL_S", 0.01)
    _, first = begin(run, out, 1, "{run_dir}/step-*")
    folder = run.path / "step-7"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"1")
    first.end()
    assert made_progress(run) == [False]  # .metadata comes last
    _, second = begin(run, out, 2, "{run_dir}/step-*")
    (folder / ".metadata").write_bytes(pickle.dumps("__0_0.distcp"))
    log = run.attempt(2).events_path("checkpoints")
    assert clock.wait_until(lambda: len(log.read_text().splitlines()) == 2, 30.0)
    second.end()
    assert [e.get("path") for e in events.for_attempt(run.attempt(2))] == [None, str(folder)]


def test_reported_checkpoint_is_chosen_without_a_pattern(run: RunDir, out: Path) -> None:
    path = save(out / "a.pt", 100.0)
    broken = save(out / "b.pt", 200.0, whole=False)
    chosen, first = begin(run, out, 1, "")
    first.end()
    log = EventLog(run.attempt(1).events_path("hooks-rank-0"))
    for step, saved in enumerate((path, broken), start=1):
        log.write("checkpoint", step=step, path=saved)
    log.close()
    assert (chosen, begin(run, out, 2, "")[0]) == ("", path)
    assert not run.attempt(2).events_path("checkpoints").exists()


def test_recipe_has_no_program_checkpoints(run: RunDir) -> None:
    (run.path / "attempts" / "1").mkdir()
    watched = ProgramCheckpoints(run, run.attempt(1), RunSpec())
    assert watched.begin() == ""
    watched.end()
    assert not list(run.attempt(1).path.iterdir())

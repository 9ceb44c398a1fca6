"""The runs of a sweep on this machine, with supervisors that are real and jobs that are a line of bash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from clustertrain import clock
from clustertrain.errors import SchedulerError
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import COMPLETING, PENDING, RUNNING, ArraySubmission
from clustertrain.scheduler.local import LocalBackend, LocalJob, job_folder
from clustertrain.scheduler.local_supervisor import _is_alive

TIMEOUT_S = 30.0
# Each waits for a file `go` beside it, and tells of its start and end.
JOB = 'echo "start $(basename "$PWD")" >> "$CLUSTERTRAIN_HOME/told"\nuntil [ -e go ]; do sleep 0.05; done\n'
backend = LocalBackend()
Submit = Callable[..., list[tuple[RunDir, str]]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    made: list[str] = []

    def submit(number: int, at_once: int | None = None) -> list[tuple[RunDir, str]]:
        runs = [run_dir.create_run(f"r{n}") for n in range(number)]
        for run in runs:
            run.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
            run.job_script.write_text(JOB)
        job_ids = backend.submit_array(ArraySubmission(tmp_path, runs, at_once, os.environ))
        made.extend(job_ids)
        return list(zip(runs, job_ids, strict=True))

    yield submit
    backend.cancel(*made)
    assert clock.wait_until(lambda: not any(v.is_alive for v in backend.query_jobs(made).values()), TIMEOUT_S, 0.05)


def becomes(job_id: str, state: str) -> None:
    assert clock.wait_until(lambda: backend.query_jobs([job_id])[job_id].state == state, TIMEOUT_S, 0.05), (
        backend.query_jobs([job_id])
    )


def have_started(tmp_path: Path, *runs: str) -> None:
    """These and no others. A job is told as running a moment before its script says so."""

    def said() -> list[str]:
        return sorted(line.split()[1][:2] for line in (tmp_path / "told").read_text().splitlines())

    assert clock.wait_until(lambda: len(said()) >= len(runs), TIMEOUT_S, 0.05) and said() == list(runs), said()


def record(job_id: str) -> LocalJob:
    job = job_folder(job_id).read()
    assert job is not None
    return job


def test_one_at_a_time_unless_told_otherwise(submit: Submit, tmp_path: Path) -> None:
    (a, first), (b, second), (c, third) = submit(3)
    becomes(first, RUNNING)
    assert {job_id: view.reason for job_id, view in backend.query_jobs([second, third]).items()} == {
        second: f"waits for {first}", third: f"waits for {second}"
    }  # fmt: skip
    (a.path / "go").touch()
    becomes(second, RUNNING)
    assert (backend.query_jobs([first])[first].state, backend.query_jobs([third])[third].state) == (
        "COMPLETED",
        PENDING,
    )
    for run in (b, c):
        (run.path / "go").touch()
    becomes(third, "COMPLETED")
    have_started(tmp_path, "r0", "r1", "r2")


def test_two_at_once_and_one_that_is_cancelled_while_it_waits(submit: Submit, tmp_path: Path) -> None:
    jobs = submit(5, at_once=2)
    ids = [job_id for _, job_id in jobs]
    assert [record(job_id).depends_on for job_id in ids] == ["", "", *ids[:3]]
    becomes(ids[0], RUNNING)
    becomes(ids[1], RUNNING)
    backend.cancel(ids[2])
    becomes(ids[2], "CANCELLED")
    # The last one has waited for that one, and must not start beside the two that run.
    assert clock.wait_until(lambda: record(ids[4]).reason == f"waits for {ids[0]}", TIMEOUT_S, 0.05)
    (jobs[1][0].path / "go").touch()
    becomes(ids[3], RUNNING)
    have_started(tmp_path, "r0", "r1", "r3")


def test_a_predecessor_that_starts_again_keeps_its_turn(submit: Submit, tmp_path: Path) -> None:
    (a, first), (_, second) = submit(2)
    becomes(first, RUNNING)
    backend.requeue(first)
    (a.path / "go").touch()
    becomes(first, "COMPLETED")
    becomes(second, RUNNING)
    have_started(tmp_path, "r0", "r0", "r1")


def test_a_predecessor_whose_supervisor_was_killed_is_not_waited_for(submit: Submit) -> None:
    (_, first), (_, second) = submit(2)
    becomes(first, RUNNING)
    supervisor = psutil.Process(record(first).pid)
    children = supervisor.children(recursive=True)
    supervisor.kill()
    for child in children:  # what batch does by itself, and a line of bash does not
        with contextlib.suppress(psutil.NoSuchProcess):  # which of them are still there is a matter of moments
            child.kill()
    becomes(second, RUNNING)


def test_a_predecessor_on_another_machine_is_in_nobodys_way(submit: Submit) -> None:
    ((_, job_id),) = submit(1)
    becomes(job_id, RUNNING)
    assert _is_alive(job_id) and not _is_alive("local-99")
    other = record(job_id)
    other.job_id, other.host, other.state = "local-7", "elsewhere", COMPLETING
    job_folder("local-7").path.mkdir()
    job_folder("local-7").write(other)
    assert not _is_alive("local-7")


def test_a_supervisor_that_does_not_start_takes_the_others_back(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, calls = LocalBackend._submit, []

    def broken(*words: object) -> str:
        calls.append(words)
        if len(calls) == 3:
            raise SchedulerError("the local supervisor did not start")
        return start(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalBackend, "_submit", broken)
    with pytest.raises(SchedulerError):
        submit(4)
    assert len(calls) == 3
    states = [record(f"local-{p.name}").state for p in (tmp_path / "local").iterdir()]
    assert states == ["CANCELLED", "CANCELLED"]

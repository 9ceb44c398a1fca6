"""The runs of a sweep on this machine. The supervisors are real; the jobs are two lines of bash."""

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
# Each job records its start and waits for a file `go` in its folder.
JOB = 'echo "start $(basename "$PWD")" >> "$CLUSTERTRAIN_HOME/starts"\nuntil [ -e go ]; do sleep 0.05; done\n'
backend = LocalBackend()
Submit = Callable[..., list[tuple[RunDir, str]]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    submitted: list[str] = []

    def submit(count: int, at_once: int | None = None) -> list[tuple[RunDir, str]]:
        runs = [run_dir.create_run(f"r{n}") for n in range(count)]
        for run in runs:
            run.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
            run.job_script.write_text(JOB)
        job_ids = backend.submit_array(ArraySubmission(tmp_path, runs, at_once, os.environ))
        submitted.extend(job_ids)
        return list(zip(runs, job_ids, strict=True))

    yield submit
    backend.cancel(*submitted)
    assert clock.wait_until(
        lambda: not any(v.is_alive for v in backend.query_jobs(submitted).values()), TIMEOUT_S, 0.05
    )


def wait_for_state(job_id: str, state: str) -> None:
    assert clock.wait_until(lambda: backend.query_jobs([job_id])[job_id].state == state, TIMEOUT_S, 0.05), (
        backend.query_jobs([job_id])
    )


def assert_started(tmp_path: Path, *runs: str) -> None:
    """Assert that exactly these runs have started. A job counts as running a moment before its script records it."""

    def started() -> list[str]:
        return sorted(line.split()[1][:2] for line in (tmp_path / "starts").read_text().splitlines())

    assert clock.wait_until(lambda: len(started()) >= len(runs), TIMEOUT_S, 0.05) and started() == list(runs), started()


def read_job(job_id: str) -> LocalJob:
    job = job_folder(job_id).read()
    assert job is not None
    return job


def test_jobs_run_one_at_a_time_by_default(submit: Submit, tmp_path: Path) -> None:
    (a, first), (b, second), (c, third) = submit(3)
    wait_for_state(first, RUNNING)
    assert {job_id: view.reason for job_id, view in backend.query_jobs([second, third]).items()} == {
        second: f"waits for {first}", third: f"waits for {second}"
    }  # fmt: skip
    (a.path / "go").touch()
    wait_for_state(second, RUNNING)
    assert (backend.query_jobs([first])[first].state, backend.query_jobs([third])[third].state) == (
        "COMPLETED",
        PENDING,
    )
    for run in (b, c):
        (run.path / "go").touch()
    wait_for_state(third, "COMPLETED")
    assert_started(tmp_path, "r0", "r1", "r2")


@pytest.mark.long
def test_cancelled_pending_job_keeps_the_limit_of_two_at_once(submit: Submit, tmp_path: Path) -> None:
    jobs = submit(5, at_once=2)
    ids = [job_id for _, job_id in jobs]
    assert [read_job(job_id).depends_on for job_id in ids] == ["", "", *ids[:3]]
    wait_for_state(ids[0], RUNNING)
    wait_for_state(ids[1], RUNNING)
    backend.cancel(ids[2])
    wait_for_state(ids[2], "CANCELLED")
    # The last job waited for the cancelled one. It must not start while two others run.
    assert clock.wait_until(lambda: read_job(ids[4]).reason == f"waits for {ids[0]}", TIMEOUT_S, 0.05)
    (jobs[1][0].path / "go").touch()
    wait_for_state(ids[3], RUNNING)
    assert_started(tmp_path, "r0", "r1", "r3")


@pytest.mark.long
def test_requeued_predecessor_keeps_its_turn(submit: Submit, tmp_path: Path) -> None:
    (a, first), (_, second) = submit(2)
    wait_for_state(first, RUNNING)
    backend.requeue(first)
    (a.path / "go").touch()
    wait_for_state(first, "COMPLETED")
    wait_for_state(second, RUNNING)
    assert_started(tmp_path, "r0", "r0", "r1")


@pytest.mark.long
def test_job_starts_if_its_predecessors_supervisor_was_killed(submit: Submit) -> None:
    (_, first), (_, second) = submit(2)
    wait_for_state(first, RUNNING)
    supervisor = psutil.Process(read_job(first).pid)
    children = supervisor.children(recursive=True)
    supervisor.kill()
    for child in children:  # a batch process ends by itself here, bash does not
        with contextlib.suppress(psutil.NoSuchProcess):  # some may have ended already
            child.kill()
    wait_for_state(second, RUNNING)


def test_predecessor_on_another_machine_is_not_alive(submit: Submit) -> None:
    ((_, job_id),) = submit(1)
    wait_for_state(job_id, RUNNING)
    assert _is_alive(job_id) and not _is_alive("local-99")
    other = read_job(job_id)
    other.job_id, other.host, other.state = "local-7", "elsewhere", COMPLETING
    job_folder("local-7").path.mkdir()
    job_folder("local-7").write(other)
    assert not _is_alive("local-7")


def test_supervisor_that_does_not_start_cancels_the_others(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, calls = LocalBackend._submit, []

    def broken(*args: object) -> str:
        calls.append(args)
        if len(calls) == 3:
            raise SchedulerError("the local supervisor did not start")
        return start(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalBackend, "_submit", broken)
    with pytest.raises(SchedulerError):
        submit(4)
    assert len(calls) == 3
    states = [read_job(f"local-{p.name}").state for p in (tmp_path / "local").iterdir()]
    assert states == ["CANCELLED", "CANCELLED"]

"""The start of the batch process with a run directory that cannot be written, and a cancel marker while it runs."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from clustertrain import fsio
from clustertrain.agent import controller as module
from clustertrain.agent import startup as beginning
from clustertrain.agent.controller import JobController, JobStep
from clustertrain.run import run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.slurm import SlurmBackend
from tests.fakes.slurm.fixture import FakeSlurm, fake_slurm  # noqa: F401


@pytest.fixture
def run(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> RunDir:  # noqa: F811
    made = run_dir.create_run("started")
    made.spec.write_text("version = 1\n")
    monkeypatch.setenv("CLUSTERTRAIN_RUN_DIR", str(made.path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(beginning, "RETRY_S", 0.0)
    fake_slurm.answers("squeue", stdout="7|RUNNING|0|10|N/A|N/A|n1|None|\n")
    return made


def read_only(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The next so many attempts cannot be claimed."""
    claim_folder, left = fsio.claim_folder, [None] * times

    def claim(path: Path, **options: Any) -> bool:
        if left and path.parent.name == "attempts":
            left.pop()
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return claim_folder(path, **options)

    monkeypatch.setattr(fsio, "claim_folder", claim)


def test_a_read_only_run_directory_is_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(monkeypatch, 3)
    _, _, held = beginning.claim_run(SlurmBackend())
    assert held.attempt.n == 1


def test_one_that_stays_read_only_gives_the_nodes_back_with_a_requeue(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm  # noqa: F811
) -> None:  # fmt: skip
    read_only(monkeypatch, 99)
    monkeypatch.setattr(beginning, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "Signals", lambda: None)
    assert module.main() == 75
    assert [c.argv for c in fake_slurm.calls("scontrol")] == [["requeue", "7"]]
    # Not without an end.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    assert module.main() == 1
    assert len(fake_slurm.calls("scontrol")) == 1


class Running(JobController):
    def __init__(self, run: RunDir) -> None:
        self.run, self.aborted = run, False
        self.asked: list[str] = []

    def _request_stop(self, job_step: JobStep, source: str) -> None:
        self.asked.append(source)
        job_step.stop_requested_at = 1.0

    def _abort(self, job_step: JobStep) -> None:
        self.aborted = True


def test_the_cancel_marker_stops_a_running_attempt_and_ends_it_by_force_in_the_end(run: RunDir) -> None:
    one, job_step = Running(run), JobStep(cast(Any, None))
    one._watch_cancellation(job_step, 100.0)
    assert one.asked == []
    fsio.write_json(run.cancel_marker, {"t": 1.0})
    for now in (101.0, 102.0, 101.0 + module.CANCEL_S - 1):
        one._watch_cancellation(job_step, now)
    assert (one.asked, one.aborted) == (["cancel"], False)
    one._watch_cancellation(job_step, 101.0 + module.CANCEL_S + 1)
    assert one.aborted


class Child:
    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize(("writable", "number"), [(True, signal.SIGUSR2), (False, signal.SIGUSR1)])
def test_stop_without_a_stop_file_is_not_taken_for_the_early_warning(
    tmp_path: Path, writable: bool, number: signal.Signals
) -> None:
    controller = JobController.__new__(JobController)
    controller.attempt = RunDir(tmp_path / "run-abcdef").attempt(1)
    controller.attempt.events.mkdir(parents=True)
    controller.log = EventLog(controller.attempt.events_path("batch"))
    if not writable:
        controller.attempt.stop_request.mkdir()
    child = Child()
    controller._request_stop(JobStep(cast(Any, child)), "cancel")
    assert child.signals == [number]

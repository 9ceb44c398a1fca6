"""The batch process: its start with a read-only run folder, the cancel marker, and a stop without a stop file."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from clustertrain import fsio
from clustertrain.agent import batch_process as module
from clustertrain.agent import startup
from clustertrain.agent.batch_process import BatchProcess, JobStep
from clustertrain.run import run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.slurm import SlurmBackend
from tests.fakes.slurm.fixture import FakeSlurm, fake_slurm  # noqa: F401


@pytest.fixture
def run(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> RunDir:  # noqa: F811
    run = run_dir.create_run("started")
    run.spec.write_text("version = 1\n")
    monkeypatch.setenv("CLUSTERTRAIN_RUN_DIR", str(run.path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(startup, "RETRY_S", 0.0)
    fake_slurm.answers("squeue", stdout="7|RUNNING|0|10|N/A|N/A|n1|None|\n")
    return run


def make_read_only(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Make the next `times` claims of an attempt fail with EROFS."""
    claim_folder, left = fsio.claim_folder, [None] * times

    def claim(path: Path, **options: Any) -> bool:
        if left and path.parent.name == "attempts":
            left.pop()
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return claim_folder(path, **options)

    monkeypatch.setattr(fsio, "claim_folder", claim)


def test_start_waits_for_a_read_only_run_folder(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    make_read_only(monkeypatch, 3)
    _, _, held = startup.claim_run(SlurmBackend())
    assert held.attempt.n == 1


def test_run_folder_that_stays_read_only_requeues_the_job(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm  # noqa: F811
) -> None:  # fmt: skip
    make_read_only(monkeypatch, 99)
    monkeypatch.setattr(startup, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "Signals", lambda: None)
    assert module.main() == 75
    assert [c.argv for c in fake_slurm.calls("scontrol")] == [["requeue", "7"]]
    # After enough restarts it gives up.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    assert module.main() == 1
    assert len(fake_slurm.calls("scontrol")) == 1


class CancelWatcher(BatchProcess):
    def __init__(self, run: RunDir) -> None:
        self.run, self.aborted = run, False
        self.requests: list[str] = []

    def _request_stop(self, job_step: JobStep, source: str) -> None:
        self.requests.append(source)
        job_step.stop_requested_at = 1.0

    def _abort(self, job_step: JobStep) -> None:
        self.aborted = True


def test_cancel_marker_stops_the_attempt_and_later_aborts_it(run: RunDir) -> None:
    watcher, job_step = CancelWatcher(run), JobStep(cast(Any, None))
    watcher._watch_cancellation(job_step, 100.0)
    assert watcher.requests == []
    fsio.write_json(run.cancel_marker, {"t": 1.0})
    for now in (101.0, 102.0, 101.0 + module.CANCEL_S - 1):
        watcher._watch_cancellation(job_step, now)
    assert (watcher.requests, watcher.aborted) == (["cancel"], False)
    watcher._watch_cancellation(job_step, 101.0 + module.CANCEL_S + 1)
    assert watcher.aborted


class FakeChild:
    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize(("writable", "number"), [(True, signal.SIGUSR2), (False, signal.SIGUSR1)])
def test_stop_sends_sigusr1_when_the_stop_file_fails(tmp_path: Path, writable: bool, number: signal.Signals) -> None:
    batch_process = BatchProcess.__new__(BatchProcess)
    batch_process.attempt = RunDir(tmp_path / "run-abcdef").attempt(1)
    batch_process.attempt.events.mkdir(parents=True)
    batch_process.log = EventLog(batch_process.attempt.events_path("batch"))
    if not writable:
        batch_process.attempt.stop_request.mkdir()
    child = FakeChild()
    batch_process._request_stop(JobStep(cast(Any, child)), "cancel")
    assert child.signals == [number]


def test_checkpoint_that_cannot_be_handed_to_the_agents_requeues_the_job(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm  # noqa: F811
) -> None:  # fmt: skip
    """Without it, a command would start from the beginning."""
    write_json = fsio.write_json

    def write(path: Path, document: Any, **options: Any) -> None:
        if path.name == "checkpoint.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_json(path, document, **options)

    monkeypatch.setattr(fsio, "write_json", write)
    monkeypatch.setattr(module.ProgramCheckpoints, "begin", lambda self: "/out/step-7")
    monkeypatch.setattr("sys.argv", ["batch", "--", "srun"])
    monkeypatch.setattr(BatchProcess, "_start_step", lambda *_: pytest.fail("the ranks started"))
    monkeypatch.setattr(module, "Signals", lambda: None)
    assert module.main() == 75
    assert [c.argv for c in fake_slurm.calls("scontrol")] == [["requeue", "7"]]

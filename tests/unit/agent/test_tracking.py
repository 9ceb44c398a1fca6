"""The tracking process under the agent: a killed one is restarted, and none outlives or delays a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertrain import clock, fsio, proc
from clustertrain.agent import tracking
from clustertrain.agent.tracking import TrackingProcess
from clustertrain.run import events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from tests.unit.tracking import reading_back
from tests.unit.tracking.tracked_runs import loss, make, write


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make(tmp_path, tracking={"trackers": ["tensorboard"]})
    write(run, 1, 1, 2)
    return run


@pytest.fixture
def process(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackingProcess]:
    monkeypatch.setattr(tracking, "RESTART_S", 0.0)
    log = EventLog(run.attempt(1).events_path("agent-here"))
    process = TrackingProcess(run, run.attempt(1), os.environ, log)
    yield process
    process.stop(0.0)
    log.close()


def last_tracked_step(run: RunDir) -> int:
    return int((fsio.poll_json(run.tracking / "state" / "tensorboard.json") or {}).get("step", -1))


def failure_reasons(run: RunDir) -> list[str]:
    return [str(e["reason"]) for e in events.filter_by_name(events.for_attempt(run.attempt(1)), "tracking_failed")]


@pytest.mark.long
def test_killed_process_restarts_and_loses_no_value(run: RunDir, process: TrackingProcess) -> None:
    process.start()
    first = process.pid
    assert first is not None and clock.wait_until(lambda: last_tracked_step(run) == 2, 60)
    os.kill(first, signal.SIGTERM)  # meant for the ranks
    write(run, 1, 3, 4)
    assert clock.wait_until(lambda: last_tracked_step(run) == 4, 60)
    os.kill(first, signal.SIGKILL)

    def is_restarted() -> bool:
        process.poll()
        return process.pid not in (None, first)

    assert clock.wait_until(is_restarted, 60)
    write(run, 1, 5, 6)
    fsio.make_folder(run.attempt(1).results)
    fsio.write_json(run.attempt(1).result_path("here"), {"ending": "completed"})
    process.stop(60)
    assert reading_back.tensorboard(run) == [(s, loss(s)) for s in range(1, 7)]
    assert failure_reasons(run) == [f"the process ended with code -{int(signal.SIGKILL)}"]


@pytest.mark.long
def test_kill_during_wandb_writes_loses_and_repeats_nothing(run: RunDir, process: TrackingProcess) -> None:
    run.spec.write_text(
        run.spec.read_text().replace('"tensorboard"', '"wandb"').replace("offline = false", "offline = true")
    )
    write(run, 1, 3, 600)
    for min_bytes in (0, 20_000):
        process.start()
        child = process._child
        assert child is not None
        assert clock.wait_until(
            lambda n=min_bytes: sum(p.stat().st_size for p in reading_back.wandb_files(run)) > n, 60
        )
        proc.kill_process_tree(child)
        process.poll()
    process.start()
    fsio.make_folder(run.attempt(1).results)
    fsio.write_json(run.attempt(1).result_path("here"), {"ending": "completed"})
    process.stop(60)
    assert reading_back.wandb(run) == [(s, loss(s)) for s in range(1, 601)]


def test_process_that_misses_its_deadline_is_killed(run: RunDir, process: TrackingProcess) -> None:
    process.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # like a process that waits for a server
    process.stop(0.1)
    assert not Path(f"/proc/{pid}").exists()
    (reason,) = failure_reasons(run)
    assert reason.startswith("not finished after 0.1 s; the next attempt")


@pytest.mark.long
def test_process_ends_when_another_one_owns_the_tracking(run: RunDir, process: TrackingProcess) -> None:
    process.start()
    assert clock.wait_until(lambda: last_tracked_step(run) == 2, 60)
    fsio.write_json(run.tracking / "owner.json", {"owner": "somebody"})
    child = process._child
    assert child is not None and clock.wait_until(lambda: child.poll() == 0, 60)


def test_without_trackers_there_is_no_process(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 2)
    log = EventLog(run.attempt(1).events_path("agent-here"))
    process = TrackingProcess(run, run.attempt(1), os.environ, log)
    process.start()
    assert process.pid is None and not run.tracking.exists()
    log.close()


@pytest.mark.long
def test_process_that_fails_is_reported_and_not_restarted(run: RunDir, process: TrackingProcess) -> None:
    run.tracking.write_text("in the way")
    process.start()

    def has_ended() -> bool:
        process.poll()
        return process.pid is None

    assert clock.wait_until(has_ended, 60)
    process.poll()
    assert process.pid is None and failure_reasons(run) == ["the process ended with code 1, and is not started again"]
    assert (
        "Not a directory" in (run.attempt(1).logs / "tracking.log").read_text()
        or "File exists" in (run.attempt(1).logs / "tracking.log").read_text()
    )

"""The tracking process as the agent keeps it: killed it goes on, and it never outlives or delays a run."""

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
def kept(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackingProcess]:
    monkeypatch.setattr(tracking, "RESTART_S", 0.0)
    log = EventLog(run.attempt(1).events_path("agent-here"))
    one = TrackingProcess(run, run.attempt(1), os.environ, log)
    yield one
    one.stop(0.0)
    log.close()


def handed(run: RunDir) -> int:
    return int((fsio.poll_json(run.tracking / "state" / "tensorboard.json") or {}).get("step", -1))


def complaints(run: RunDir) -> list[str]:
    return [str(e["reason"]) for e in events.filter_by_name(events.for_attempt(run.attempt(1)), "tracking_failed")]


def test_killed_while_it_runs_it_is_started_again_and_ends_when_it_is_told(run: RunDir, kept: TrackingProcess) -> None:
    kept.start()
    first = kept.pid
    assert first is not None and clock.wait_until(lambda: handed(run) == 2, 60)
    os.kill(first, signal.SIGTERM)  # meant for the ranks
    write(run, 1, 3, 4)
    assert clock.wait_until(lambda: handed(run) == 4, 60)
    os.kill(first, signal.SIGKILL)

    def another() -> bool:
        kept.poll()
        return kept.pid not in (None, first)

    assert clock.wait_until(another, 60)
    write(run, 1, 5, 6)
    fsio.make_folder(run.attempt(1).results)
    fsio.write_json(run.attempt(1).result_path("here"), {"ending": "completed"})
    kept.stop(60)
    assert reading_back.tensorboard(run) == [(s, loss(s)) for s in range(1, 7)]
    assert complaints(run) == [f"the process ended with code -{int(signal.SIGKILL)}"]


@pytest.mark.long
def test_killed_while_wandb_writes_nothing_is_lost_and_nothing_there_twice(run: RunDir, kept: TrackingProcess) -> None:
    run.spec.write_text(
        run.spec.read_text().replace('"tensorboard"', '"wandb"').replace("offline = false", "offline = true")
    )
    write(run, 1, 3, 600)
    for least in (0, 20_000):
        kept.start()
        child = kept._child
        assert child is not None
        assert clock.wait_until(lambda n=least: sum(p.stat().st_size for p in reading_back.wandb_files(run)) > n, 60)
        proc.kill_process_tree(child)
        kept.poll()
    kept.start()
    fsio.make_folder(run.attempt(1).results)
    fsio.write_json(run.attempt(1).result_path("here"), {"ending": "completed"})
    kept.stop(60)
    assert reading_back.wandb(run) == [(s, loss(s)) for s in range(1, 601)]


def test_one_that_is_not_done_in_time_is_killed(run: RunDir, kept: TrackingProcess) -> None:
    kept.start()
    pid = kept.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # as one that waits for a server
    kept.stop(0.1)
    assert not Path(f"/proc/{pid}").exists()
    (said,) = complaints(run)
    assert said.startswith("not finished after 0.1 s; the next attempt")


def test_it_ends_with_the_agent_and_leaves_the_run_to_a_later_one(run: RunDir, kept: TrackingProcess) -> None:
    kept.start()
    assert clock.wait_until(lambda: handed(run) == 2, 60)
    fsio.write_json(run.tracking / "owner.json", {"owner": "somebody"})
    child = kept._child
    assert child is not None and clock.wait_until(lambda: child.poll() == 0, 60)


def test_without_trackers_there_is_no_process(tmp_path: Path) -> None:
    run = make(tmp_path)
    write(run, 1, 1, 2)
    log = EventLog(run.attempt(1).events_path("agent-here"))
    one = TrackingProcess(run, run.attempt(1), os.environ, log)
    one.start()
    assert one.pid is None and not run.tracking.exists()
    log.close()


def test_a_process_that_fails_is_said_and_left(run: RunDir, kept: TrackingProcess) -> None:
    run.tracking.write_text("in the way")
    kept.start()

    def over() -> bool:
        kept.poll()
        return kept.pid is None

    assert clock.wait_until(over, 60)
    kept.poll()
    assert kept.pid is None and complaints(run) == ["the process ended with code 1, and is not started again"]
    assert (
        "Not a directory" in (run.attempt(1).logs / "tracking.log").read_text()
        or "File exists" in (run.attempt(1).logs / "tracking.log").read_text()
    )

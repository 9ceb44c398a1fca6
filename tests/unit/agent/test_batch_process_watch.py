"""The first node's agent notices that the batch process was killed, and asks Slurm for the requeue instead. The
recorded answers about such a job are from Slurm 22.05."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.agent.batch_process_watch import BatchProcessWatch
from clustertrain.run import attempts
from clustertrain.run.events import EventLog
from tests.fakes.slurm.fixture import FakeSlurm, fake_slurm  # noqa: F401
from tests.unit.agent.test_node_agent_settings import agent

KILLED = "7|COMPLETING|0|10|20|N/A|n1|JobLaunchFailure|\n"
CANCELLED = "7|COMPLETING|0|10|20|N/A|n1|None|\n"
RUNNING = "7|RUNNING|0|10|20|N/A|n1|None|\n"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


@pytest.fixture
def batch() -> Iterator[subprocess.Popen[bytes]]:
    """A child process that stands in for the batch process."""
    child = subprocess.Popen([sys.executable, "-c", "input()", "clustertrain", "batch"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


@pytest.fixture
def watch(tmp_path: Path, batch: subprocess.Popen[bytes], fake_slurm: FakeSlurm) -> BatchProcessWatch:  # noqa: F811
    node_agent = agent(tmp_path / "run", SLURM_JOB_ID="7")
    record = {"job_id": "7", "restart": 0, "host": socket.gethostname(), "pid": batch.pid, "nodes": ["n1"], "t": 1.0}
    fsio.write_json(node_agent.context.attempt.record, record)
    return BatchProcessWatch(node_agent.context, EventLog(node_agent.context.attempt.events_path("agent-n1")))


def kill(batch: subprocess.Popen[bytes]) -> None:
    batch.kill()
    batch.wait()


def requeues(slurm: FakeSlurm) -> list[list[str]]:
    return [c.argv for c in slurm.calls("scontrol")]


@pytest.mark.long
def test_job_whose_batch_process_was_killed_is_requeued_once(
    watch: BatchProcessWatch, batch: subprocess.Popen[bytes], fake_slurm: FakeSlurm  # noqa: F811
) -> None:  # fmt: skip
    assert not watch.is_gone()
    kill(batch)
    assert watch.is_gone()
    # slurmctld is down, then has not noticed, then has.
    fake_slurm.answers("squeue", stderr=AWAY, rc=1)
    watch.ensure_requeued()
    fake_slurm.answers("squeue", stdout=RUNNING)
    watch.ensure_requeued()
    assert (watch.settled, requeues(fake_slurm)) == (False, [])
    fake_slurm.answers("squeue", stdout=KILLED)
    watch.ensure_requeued()
    watch.ensure_requeued()
    assert (watch.settled, requeues(fake_slurm)) == (True, [["requeue", "7"]])
    (attempt,) = attempts.load_attempts(watch._run)
    assert (attempt.ending, attempt.requeued) == ("unknown", "requeue")
    assert "batch process was killed" in str(attempt.reason)


@pytest.mark.parametrize("cause", ["scancel", "cancel", "decided", "taken over"])
def test_no_requeue_after_a_cancel_decision_or_takeover(
    cause: str, watch: BatchProcessWatch, batch: subprocess.Popen[bytes], fake_slurm: FakeSlurm  # noqa: F811
) -> None:  # fmt: skip
    kill(batch)
    fake_slurm.answers("squeue", stdout=CANCELLED if cause == "scancel" else KILLED)
    if cause == "cancel":
        fsio.write_json(watch._run.cancel_marker, {})
    if cause == "decided":
        EventLog(watch._attempt.events_path("batch")).write("ended", ending="hang", reason="…", job_id="7")
    if cause == "taken over":
        watch._run.attempt(watch._attempt.n + 1).path.mkdir()
    watch.ensure_requeued()
    assert (watch.settled, requeues(fake_slurm)) == (True, [])


def test_invisible_batch_process_does_not_count_as_killed(
    tmp_path: Path, batch: subprocess.Popen[bytes], fake_slurm: FakeSlurm  # noqa: F811
) -> None:  # fmt: skip
    node_agent = agent(tmp_path / "run", SLURM_JOB_ID="7")
    for record in ({"host": "another", "pid": batch.pid}, {"host": socket.gethostname(), "pid": os.getpid()}, {}):
        fsio.write_json(node_agent.context.attempt.record, record)
        assert not BatchProcessWatch(node_agent.context, node_agent.log).is_gone()

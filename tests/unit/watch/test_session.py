"""A watched job from attach to leave, with the real sampler below a fake srun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clustertrain import clock
from clustertrain.errors import ClusterTrainError, SchedulerError
from clustertrain.run import attempts
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.run_status import run_status
from clustertrain.telemetry.analysis.summarize import summarize
from clustertrain.watch import session as sessions
from clustertrain.watch import target
from clustertrain.watch.session import WatchOptions, WatchSession
from tests.unit.watch.cluster import JOB, FakeCluster

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "POLL_S", 0.2)


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process that srun of the job would have started as rank 1 on node02."""
    environ = {"SLURM_JOB_ID": JOB, "SLURMD_NODENAME": "node02", "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env={**os.environ, **environ}, stdin=subprocess.PIPE) as p:
        yield p
        p.communicate(b"\n")


def attach() -> WatchSession:
    session = WatchSession(target.find_job(JOB), WatchOptions(interval_s=0.2))
    session.open()
    return session


def list_samplers() -> list[int]:
    """Return the processes on the nodes of this test's runs, without srun, whose arguments name them."""
    home, found = os.environ["CLUSTERTRAIN_HOME"], []
    for process in psutil.process_iter(["cmdline"]):
        argv = process.info["cmdline"] or ()
        if "watch-node" in argv and "--overlap" not in argv and home in argv[-1]:
            found.append(process.pid)
    return found


def test_report_of_all_nodes_and_their_ranks(fake_cluster: FakeCluster, rank: subprocess.Popen[bytes]) -> None:
    session = attach()
    try:
        session.wait_for_samples()
        assert run_status(session.run).state == "running"
        summary = summarize(session.run)
    finally:
        session.close()
    assert list_samplers() == []
    assert summary.watched and summary.training is None
    assert {(g.node, g.index, tuple(g.ranks)) for g in summary.gpus} == {
        ("node01", 0, ()), ("node01", 1, ()), ("node02", 0, (1,)), ("node02", 1, ()),
    }  # fmt: skip
    assert [h.memory_allocated_gib for h in summary.hosts] == [7.812, 7.812]
    assert not [i for i in summary.insights if i.severity == "critical"]
    spec = load_spec(session.run)
    assert (spec.watched, spec.job.nodes, spec.job.gpus, spec.job.name) == (True, 2, 2, "own train")
    (argv,) = [json.loads(line) for line in (fake_cluster.slurm.folder / "srun.argv").read_text().splitlines()]
    assert {"--overlap", "--jobid=7", "--mem=0", "--gpus-per-node=2", "--nodelist=node01,node02"} <= set(argv)


def test_attaching_again_continues_the_same_run_and_attempt(fake_cluster: FakeCluster) -> None:
    runs = []
    for _ in range(2):
        session = attach()
        session.wait_for_samples()
        session.close()
        runs.append(session.run)
    assert runs[0] == runs[1]
    assert [a.n for a in attempts.load_attempts(runs[0])] == [1]
    assert sorted(p.name for p in (runs[0].attempt(1).telemetry / "node01").iterdir()) == ["0", "1"]


def test_second_command_takes_over_when_the_first_leaves(fake_cluster: FakeCluster) -> None:
    first = attach()
    second = attach()
    try:
        assert second.run == first.run and len(list_samplers()) == 2
        first.close()
        assert clock.wait_until(lambda: len(list_samplers()) == 2, 20)
    finally:
        first.close()
        second.close()
    assert list_samplers() == []


def test_requeued_job_gets_another_attempt(fake_cluster: FakeCluster) -> None:
    session = attach()
    try:
        fake_cluster.set_accounting("PREEMPTED")
        fake_cluster.set_job("PENDING", restart=1)
        assert clock.wait_until(lambda: attempts.load_attempts(session.run)[0].ending is not None, 20)
        assert run_status(session.run).state == "requeued"
        session._step.close()  # type: ignore[union-attr]  # Slurm ends the step with the job
        fake_cluster.set_job("RUNNING", restart=1)
        assert clock.wait_until(lambda: len(attempts.load_attempts(session.run)) == 2, 20)
    finally:
        session.close()
    first, second = attempts.load_attempts(session.run)
    assert (first.ending, first.requeued, first.restart) == ("preempted", "slurm", 0)
    assert (second.ending, second.restart) == (None, 1)


@pytest.mark.parametrize(
    ("state", "expected"), [("COMPLETED", "completed"), ("FAILED", "failed"), ("CANCELLED", "cancelled")]
)
def test_end_of_the_job(fake_cluster: FakeCluster, state: str, expected: str) -> None:
    session = attach()
    try:
        fake_cluster.set_accounting(state)
        fake_cluster.set_job(state)
        assert session.ended.wait(20)
    finally:
        session.close()
    status = run_status(session.run)
    assert (status.state, status.continue_command, status.undecided_reason) == (expected, None, None)


def test_end_that_nobody_watched_comes_from_the_accounting(fake_cluster: FakeCluster) -> None:
    session = attach()
    session.close()
    fake_cluster.forget_job()
    fake_cluster.set_accounting("COMPLETED")
    status = run_status(session.run)
    assert (status.state, status.history[-1].ending) == ("completed", "completed")


def test_refusal_has_the_words_of_slurm_and_leaves_no_run(fake_cluster: FakeCluster) -> None:
    words = "srun: error: Unable to create step for job 7: Access/permission denied\n"
    fake_cluster.set_srun(refusal=words)
    fake_cluster.set_job("RUNNING", uid=4711)
    with pytest.raises(SchedulerError, match="in job 7 of amy: Unable to create step for job 7: Access/permission"):
        attach()
    assert list((fake_cluster.home / "runs").iterdir()) == []


def test_srun_without_overlap(fake_cluster: FakeCluster) -> None:
    fake_cluster.set_srun(refusal="srun: unrecognized option '--overlap'\n")
    with pytest.raises(SchedulerError, match=r"too old for `watch`: .*'--overlap'\n  fix: it needs Slurm 20.11"):
        attach()


def test_broken_node_is_named_and_the_others_are_sampled(fake_cluster: FakeCluster) -> None:
    fake_cluster.set_srun(broken=("node02",))
    notes: list[str] = []
    session = WatchSession(target.find_job(JOB), WatchOptions(note=notes.append))
    try:
        session.open()
        session.wait_for_samples()
        assert {h.node for h in summarize(session.run).hosts} == {"node01"}
    finally:
        session.close()
    assert notes == ["node02 is not sampled: ImportError: no luck"]


def test_all_nodes_broken(fake_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ClusterTrainError, match=r"node01 \(and 1 more\): there is no Python at /nonexistent/python"):
        attach()
    assert list((fake_cluster.home / "runs").iterdir()) == []


def test_samplers_leave_after_a_kill_of_the_command(fake_cluster: FakeCluster, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "clustertrain", "watch", JOB]
    with (tmp_path / "out").open("wb") as out, subprocess.Popen(argv, stdout=out, stderr=out) as command:
        assert clock.wait_until(lambda: "node02" in (tmp_path / "out").read_text(), 30)
        command.kill()
    assert clock.wait_until(lambda: list_samplers() == [], 20)

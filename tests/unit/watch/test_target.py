"""What `watch` refuses, and with which words."""

from __future__ import annotations

import pytest

from clustertrain.errors import ClusterTrainError, NotFound, SchedulerError, UnsuitableEnvironment, UsageError
from clustertrain.run.run_dir import create_run
from clustertrain.submit.transaction import record_submission
from clustertrain.watch import target
from tests.unit.watch.cluster import JOB, FakeCluster

ROW = "{id}|{number}|{state}|0|root|0|1|1|1|{het}|node01|None|\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("abc", "'abc' is not the id of a Slurm job"),
        ("0", "squeue --me"),
        ("-5", "is not the id"),
        ("7; rm -rf /", "is not the id"),
        ("7.0", "clustertrain watch 7"),
        ("7.batch", "clustertrain watch 7"),
        ("7+1", "heterogeneous"),
        ("7_[1-3]", "clustertrain watch 7_0"),
        ("9" * 30, "is not the id"),
    ],
)
def test_text_that_is_no_job(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        target.check_job_id(text)
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["1", "123", "123_4"])
def test_text_that_is_a_job(text: str) -> None:
    target.check_job_id(text)


def test_machine_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UnsuitableEnvironment, match="squeue and scontrol and srun: not installed on this machine"):
        target.check_slurm()


def test_unknown_job_and_job_of_the_accounting(fake_cluster: FakeCluster) -> None:
    fake_cluster.forget_job()
    fake_cluster.set_accounting("REQUEUED", "TIMEOUT")
    with pytest.raises(NotFound, match=r"Slurm does not know job 7 any more: it has ended \(TIMEOUT\)"):
        target.find_job(JOB)
    fake_cluster.slurm.answers("sacct")
    with pytest.raises(NotFound, match=r"^Slurm does not know job 7\n"):
        target.find_job(JOB)


def test_ended_job(fake_cluster: FakeCluster) -> None:
    fake_cluster.set_job("FAILED")
    with pytest.raises(NotFound, match="job 7 has ended: FAILED"):
        target.find_job(JOB)


def test_array_and_heterogeneous_job(fake_cluster: FakeCluster) -> None:
    squeue = fake_cluster.slurm.folder / "squeue"
    rows = [ROW.format(id=f"7_{i}", number=7 + i, state="RUNNING" if i > 1 else "PENDING", het="N/A") for i in range(4)]
    squeue.write_text(f"#!/bin/sh\ncat <<'E'\n{''.join(rows)}E\n")
    with pytest.raises(UsageError, match=r"7 is an array of 4 tasks\n  fix: name one of 7_2, 7_3, 7_0, 7_1"):
        target.find_job("7")
    squeue.write_text(f"#!/bin/sh\necho '{ROW.format(id='7+0', number=7, state='RUNNING', het='7').strip()}'\n")
    with pytest.raises(UsageError, match="heterogeneous job has several sets of nodes"):
        target.find_job("7")


def test_slurm_does_not_answer(fake_cluster: FakeCluster) -> None:
    squeue = fake_cluster.slurm.folder / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    with pytest.raises(ClusterTrainError, match=r"squeue failed: .*Unable to contact slurm controller"):
        target.find_job("7")


def test_run_of_clustertrain_records_itself(fake_cluster: FakeCluster) -> None:
    run = create_run("own")
    run.spec.write_text("")
    record_submission(run, JOB, "slurm")
    with pytest.raises(UsageError, match=f"job 7 is the run {run.id}, which records its telemetry itself"):
        target.check_not_a_run(JOB)
    run.watched.write_text("{}")
    target.check_not_a_run(JOB)


def test_waiting_for_the_start(fake_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "MIN_POLL_S", 0.0)
    fake_cluster.set_job("PENDING", reason="Priority")
    waits = []

    def note(job: object) -> None:
        waits.append(job)
        fake_cluster.set_job("RUNNING")

    job = target.wait_for_start(target.find_job(JOB), note)
    assert job.is_running and job.nodes == ("node01", "node02") and len(waits) == 1


def test_job_that_ends_in_the_queue(fake_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "MIN_POLL_S", 0.0)
    fake_cluster.set_job("PENDING")
    with pytest.raises(NotFound, match="job 7 has ended: CANCELLED"):
        target.wait_for_start(target.find_job(JOB), lambda job: fake_cluster.set_job("CANCELLED"))
    fake_cluster.set_job("COMPLETING")
    with pytest.raises(SchedulerError, match="job 7 is COMPLETING"):
        target.wait_for_start(target.find_job(JOB), lambda job: None)

"""The Slurm backend against stand-ins of Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clustertrain.errors import CommandFailed, SchedulerError
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import Submission
from clustertrain.scheduler.slurm import SlurmBackend, find_work_dir
from tests.fakes.slurm.fixture import FakeSlurm


def make_run(folder: Path) -> RunDir:
    run = RunDir(folder / "demo-abcdef")
    run.path.mkdir(parents=True)
    run.job_script.write_text("#!/bin/bash\necho 'my job'\n")
    return run


def test_submit_hands_over_job_sh_and_leaves_no_files_behind(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    assert SlurmBackend().submit(Submission(run, options={"exclude": "node1,node2", "hold": ""})) == "4711"
    (call,) = fake_slurm.calls("sbatch")
    assert call.argv[:-1] == ["--parsable", f"--chdir={run.path}", "--exclude=node1,node2", "--hold"]
    assert call.script == run.job_script.read_text()
    assert Path(call.argv[-1]).is_relative_to(run.path)
    assert [p.name for p in run.path.iterdir()] == ["job.sh"]


def test_a_refusal_has_slurms_words_and_leaves_no_files_behind(
    fake_slurm: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs")
    words = "Batch job submission failed: Invalid qos specification"
    fake_slurm.answers("sbatch", stderr=f"sbatch: error: {words}\n", rc=1)
    with pytest.raises(SchedulerError) as e:
        SlurmBackend().submit(Submission(run))
    assert str(e.value) == f"Slurm refused the job: {words}"
    assert e.value.exit_code == 1
    assert [p.name for p in run.path.iterdir()] == ["job.sh"]
    assert capfd.readouterr() == ("", "")  # submitit prints the complaint as well


@pytest.mark.parametrize("said", ["77\n", "77;cluster\n", "site: welcome\n77;c\n"])
def test_the_job_id_is_found_among_what_a_site_prints(said: str, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.answers("sbatch", stdout=said)
    assert SlurmBackend().submit(Submission(make_run(tmp_path / "runs"))) == "77"


def test_no_job_id_is_an_error(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.answers("sbatch", stdout="queued\n")
    with pytest.raises(CommandFailed, match="no job id: 'queued'"):
        SlurmBackend().submit(Submission(make_run(tmp_path / "runs")))


@pytest.mark.parametrize("name", ["a%j", "x%A_%a", "%t", "sp ace", "it's", "$(touch pwned)"])
def test_hostile_run_folders(name: str, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = make_run(tmp_path / name)
    assert SlurmBackend().submit(Submission(run)) == "4711"
    (call,) = fake_slurm.calls("sbatch")
    assert f"--chdir={run.path}" in call.argv and call.script == run.job_script.read_text()
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("fake-slurm", "home", "config")] == [name]


def test_enclosing_allocation_does_not_leak(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND"):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("SLURM_CONF", "/etc/mine.conf")
    monkeypatch.setenv("MY_OWN", "stays")
    before = dict(os.environ)
    SlurmBackend().submit(Submission(make_run(tmp_path / "runs")))
    assert dict(os.environ) == before
    (call,) = fake_slurm.calls("sbatch")
    assert "leak" not in call.env.values()
    assert call.env["SLURM_CONF"] == "/etc/mine.conf" and call.env["MY_OWN"] == "stays"


def test_views_ask_once_and_only_for_what_is_wanted(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    monkeypatch.setenv("SQUEUE_STATES", "PD")
    fake_slurm.answers("squeue", stdout="3|RUNNING|1|10|20|N/A|node[01-02]|None|\n8|PENDING|0|N/A|N/A|N/A||Priority|\n")
    views = SlurmBackend().query_jobs(["3", "9_1", "3"])
    assert set(views) == {"3"} and views["3"].restarts == 1 and views["3"].nodes == ("node01", "node02")
    (call,) = fake_slurm.calls("squeue")
    assert "--jobs=3,9_1" in call.argv and "--states=all" in call.argv
    assert "--array" in call.argv  # tasks that wait would else share the line 9_[1-4]
    assert not [name for name in call.env if name.startswith("SQUEUE_")]
    assert call.env["SLURM_TIME_FORMAT"] == "%s"
    assert SlurmBackend().query_jobs([]) == {} and len(fake_slurm.calls("squeue")) == 1


def test_no_answer_is_not_no_such_job(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    assert SlurmBackend().query_jobs(["3"]) == {}
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    with pytest.raises(CommandFailed, match="Unable to contact"):
        SlurmBackend().query_jobs(["3"])


def test_starts(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCT_FORMAT", "JobID")
    fake_slurm.answers("sacct", stdout="3|REQUEUED|10|20|node01|0:0|None\n3|COMPLETED|30|40|node02|0:0|None\n")
    assert [s.nodes for s in SlurmBackend().list_starts("3")] == [("node01",), ("node02",)]
    (call,) = fake_slurm.calls("sacct")
    assert {"-D", "-X", "-P", "-n"} <= set(call.argv) and "SACCT_FORMAT" not in call.env
    fake_slurm.answers("sacct", stderr="Slurm accounting storage is disabled\n", rc=1)
    assert SlurmBackend().list_starts("3") == []
    fake_slurm.answers("sacct", stderr="sacct: error: no connection\n", rc=1)
    with pytest.raises(CommandFailed, match="no connection"):
        SlurmBackend().list_starts("3")


def test_cancel_of_an_ended_job_is_no_error(fake_slurm: FakeSlurm) -> None:
    SlurmBackend().cancel("12_3")
    fake_slurm.answers(
        "scancel", stderr="scancel: error: Kill job error on job id 12: Invalid job id specified\n", rc=1
    )
    SlurmBackend().cancel("12")
    fake_slurm.answers("scancel", stderr="scancel: error: Access/permission denied\n", rc=1)
    with pytest.raises(CommandFailed, match="permission denied"):
        SlurmBackend().cancel("12")
    assert [c.argv for c in fake_slurm.calls("scancel")] == [["12_3"], ["12"], ["12"]]


def test_several_jobs_are_cancelled_with_one_command_and_one_refusal_is_not_lost(fake_slurm: FakeSlurm) -> None:
    ended = "scancel: error: Kill job error on job id 12: Invalid job id specified\n"
    fake_slurm.answers("scancel", stderr=ended, rc=1)
    SlurmBackend().cancel("12", "13_0", "13_1")
    assert [c.argv for c in fake_slurm.calls("scancel")] == [["12", "13_0", "13_1"]]
    fake_slurm.answers("scancel", stderr=ended + "scancel: error: Access/permission denied\n", rc=1)
    with pytest.raises(CommandFailed, match=r"failed: Access/permission denied$"):
        SlurmBackend().cancel("12", "13")
    fake_slurm.answers("scancel", rc=1)
    with pytest.raises(CommandFailed, match="it gave no reason"):
        SlurmBackend().cancel("12")


def test_a_requeue(fake_slurm: FakeSlurm) -> None:
    SlurmBackend().requeue("12_3")
    assert [c.argv for c in fake_slurm.calls("scontrol")] == [["requeue", "12_3"]]


# As scontrol and sbatch of 22.05 to 25.05 print them.
REFUSALS = [
    "Requested operation is presently disabled for job 12",
    "Invalid job id specified for job 12",
    "Job is pending execution for job 12",
    "Access/permission denied for job 12",
    "Job/step already completing or completed for job 12",
    "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    "sbatch: error: invalid partition specified: nope",
    "sbatch: error: Batch job submission failed: Invalid qos specification",
    "sbatch: error: Batch job submission failed: Requested node configuration is not available",
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size …",
    "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
    "sbatch: unrecognized option '--nope'\nTry \"sbatch --help\" for more information",
]
SILENCE = [
    "Unexpected message received for job 12",
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
    "sbatch: error: Batch job submission failed: Invalid authentication credential",
    "sbatch: error: Batch job submission failed: Slurm backup controller in standby mode",
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
    "sbatch: error: Batch job submission failed: Rate limit exceeded, please retry momentarily",
    "slurm_requeue error: Job can not be altered now, try again later",
    "",
]


CASES = [*((words, SchedulerError) for words in REFUSALS), *((words, CommandFailed) for words in SILENCE)]


@pytest.mark.parametrize("command", ["scontrol", "sbatch"])
@pytest.mark.parametrize(("said", "error"), CASES)
def test_only_slurms_words_for_no_are_a_refusal(
    command: str, said: str, error: type[Exception], fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    fake_slurm.answers(command, stderr=f"{said}\n", rc=1)
    with pytest.raises(error):
        if command == "scontrol":
            SlurmBackend().requeue("12")
        else:
            SlurmBackend().submit(Submission(make_run(tmp_path / "runs")))


def test_a_submission_that_was_heard_without_an_answer_makes_no_second_job(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs")
    others = f"13|/elsewhere|\n12|{run.path}|\n11|{run.path}|\n"
    fake_slurm.answers("squeue", stdout=others)
    assert SlurmBackend().restart("12", Submission(run)) == "4711"
    fake_slurm.answers("squeue", stdout=f"14|{run.path}|\n{others}")
    assert SlurmBackend().restart("12", Submission(run)) == "14"
    assert SlurmBackend().restart("12_3", Submission(run)) == "14"
    # Without an answer nobody knows, and nothing is submitted.
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    with pytest.raises(CommandFailed):
        SlurmBackend().restart("12", Submission(run))
    assert len(fake_slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("job_id", ["", "-1", "1;2", "1,2", "$(x)", "1 2", "local-3", "1_[2-3]"])
def test_only_job_ids_reach_the_commands(job_id: str, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(SchedulerError, match="not a Slurm job id"):
        SlurmBackend().cancel(job_id)
    assert fake_slurm.calls("scancel") == []


def test_ones_own_job() -> None:
    backend = SlurmBackend()
    assert backend.current_job_id({"SLURM_JOB_ID": "5"}) == "5"
    array = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert backend.current_job_id(array) == "5_2"
    assert backend.current_job_id({}) is None and backend.current_nodes({}) == ()
    assert backend.current_nodes({"SLURM_JOB_NODELIST": "n[1-2]"}) == ("n1", "n2")


def test_the_working_directory_of_a_job(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("squeue", stdout="/shared/a b/runs/x|\n")
    assert find_work_dir("5") == Path("/shared/a b/runs/x")
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    assert find_work_dir("5") is None
    fake_slurm.answers("sacct", stdout="/shared/old\n")
    assert find_work_dir("5") == Path("/shared/old")


def test_slurm_is_available_where_sbatch_answers(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.answers("sbatch", stdout="")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert SlurmBackend().sbatch_version() is None


def test_what_the_user_typed_beats_sbatchs_environment(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SBATCH_ACCOUNT", "default")
    monkeypatch.setenv("SBATCH_PARTITION", "default")
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.job_script.write_text("#!/bin/bash\n#SBATCH --account=typed\ntrue\n")
    SlurmBackend().submit(Submission(run))
    environ = fake_slurm.calls("sbatch")[-1].env
    assert "SBATCH_ACCOUNT" not in environ
    assert environ["SBATCH_PARTITION"] == "default"

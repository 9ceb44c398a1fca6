"""The Slurm backend with fake Slurm commands."""

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


def test_submit_passes_job_sh_and_leaves_no_files(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    assert SlurmBackend().submit(Submission(run, options={"exclude": "node1,node2", "hold": ""})) == "4711"
    (call,) = fake_slurm.calls("sbatch")
    assert call.argv[:-1] == ["--parsable", f"--chdir={run.path}", "--exclude=node1,node2", "--hold"]
    assert call.script == run.job_script.read_text()
    assert Path(call.argv[-1]).is_relative_to(run.path)
    assert [p.name for p in run.path.iterdir()] == ["job.sh"]


def test_refusal_quotes_slurm_and_leaves_no_files(
    fake_slurm: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs")
    message = "Batch job submission failed: Invalid qos specification"
    fake_slurm.answers("sbatch", stderr=f"sbatch: error: {message}\n", rc=1)
    with pytest.raises(SchedulerError) as e:
        SlurmBackend().submit(Submission(run))
    assert str(e.value) == f"Slurm refused the job: {message}"
    assert e.value.exit_code == 1
    assert [p.name for p in run.path.iterdir()] == ["job.sh"]
    assert capfd.readouterr() == ("", "")  # submitit also prints sbatch's error


@pytest.mark.parametrize("stdout", ["77\n", "77;cluster\n", "site: welcome\n77;c\n"], ids=["id", "cluster", "banner"])
def test_job_id_is_found_in_the_output_of_a_site(stdout: str, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.answers("sbatch", stdout=stdout)
    assert SlurmBackend().submit(Submission(make_run(tmp_path / "runs"))) == "77"


def test_missing_job_id_is_an_error(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.answers("sbatch", stdout="queued\n")
    with pytest.raises(CommandFailed, match="no job id: 'queued'"):
        SlurmBackend().submit(Submission(make_run(tmp_path / "runs")))


@pytest.mark.parametrize("name", ["a%j", "x%A_%a", "%t", "sp ace", "it's", "$(touch pwned)"])
def test_special_characters_in_the_run_folder_are_safe(name: str, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = make_run(tmp_path / name)
    assert SlurmBackend().submit(Submission(run)) == "4711"
    (call,) = fake_slurm.calls("sbatch")
    assert f"--chdir={run.path}" in call.argv and call.script == run.job_script.read_text()
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("fake-slurm", "home", "config")] == [name]


def test_environment_of_an_outer_allocation_does_not_leak(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND"):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("SLURM_CONF", "/etc/mine.conf")
    monkeypatch.setenv("UNRELATED", "stays")
    before = dict(os.environ)
    SlurmBackend().submit(Submission(make_run(tmp_path / "runs")))
    assert dict(os.environ) == before
    (call,) = fake_slurm.calls("sbatch")
    assert "leak" not in call.env.values()
    assert call.env["SLURM_CONF"] == "/etc/mine.conf" and call.env["UNRELATED"] == "stays"


def test_query_jobs_runs_squeue_once_for_the_given_jobs(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    monkeypatch.setenv("SQUEUE_STATES", "PD")
    fake_slurm.answers("squeue", stdout="3|RUNNING|1|10|20|N/A|node[01-02]|None|\n8|PENDING|0|N/A|N/A|N/A||Priority|\n")
    views = SlurmBackend().query_jobs(["3", "9_1", "3"])
    assert set(views) == {"3"} and views["3"].restarts == 1 and views["3"].nodes == ("node01", "node02")
    (call,) = fake_slurm.calls("squeue")
    assert "--jobs=3,9_1" in call.argv and "--states=all" in call.argv
    assert "--array" in call.argv  # otherwise pending tasks would share the line 9_[1-4]
    assert not [name for name in call.env if name.startswith("SQUEUE_")]
    assert call.env["SLURM_TIME_FORMAT"] == "%s"
    assert SlurmBackend().query_jobs([]) == {} and len(fake_slurm.calls("squeue")) == 1


def test_no_answer_differs_from_an_unknown_job(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    assert SlurmBackend().query_jobs(["3"]) == {}
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    with pytest.raises(CommandFailed, match="Unable to contact"):
        SlurmBackend().query_jobs(["3"])


def test_list_starts_reads_sacct(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_cancel_of_an_ended_job_is_not_an_error(fake_slurm: FakeSlurm) -> None:
    SlurmBackend().cancel("12_3")
    fake_slurm.answers(
        "scancel", stderr="scancel: error: Kill job error on job id 12: Invalid job id specified\n", rc=1
    )
    SlurmBackend().cancel("12")
    fake_slurm.answers("scancel", stderr="scancel: error: Access/permission denied\n", rc=1)
    with pytest.raises(CommandFailed, match="permission denied"):
        SlurmBackend().cancel("12")
    assert [c.argv for c in fake_slurm.calls("scancel")] == [["12_3"], ["12"], ["12"]]


def test_several_jobs_are_cancelled_at_once_and_refusals_reported(fake_slurm: FakeSlurm) -> None:
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


def test_requeue_calls_scontrol(fake_slurm: FakeSlurm) -> None:
    SlurmBackend().requeue("12_3")
    assert [c.argv for c in fake_slurm.calls("scontrol")] == [["requeue", "12_3"]]


# As scontrol and sbatch of Slurm 22.05 to 25.05 print them.
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
NO_ANSWERS = [
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


def _short_id(value: str | type[Exception]) -> str:
    if isinstance(value, str):
        return value.rpartition("failed: ")[2].removeprefix("sbatch: error: ")[:40] or "empty"
    return "refused" if value is SchedulerError else "no-answer"


CASES = [*((text, SchedulerError) for text in REFUSALS), *((text, CommandFailed) for text in NO_ANSWERS)]


@pytest.mark.parametrize("command", ["scontrol", "sbatch"])
@pytest.mark.parametrize(("stderr", "error"), CASES, ids=_short_id)
def test_only_known_messages_count_as_a_refusal(
    command: str, stderr: str, error: type[Exception], fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    fake_slurm.answers(command, stderr=f"{stderr}\n", rc=1)
    with pytest.raises(error):
        if command == "scontrol":
            SlurmBackend().requeue("12")
        else:
            SlurmBackend().submit(Submission(make_run(tmp_path / "runs")))


@pytest.mark.long
def test_restart_finds_a_job_submitted_without_an_answer(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    others = f"13|/elsewhere|\n12|{run.path}|\n11|{run.path}|\n"
    fake_slurm.answers("squeue", stdout=others)
    assert SlurmBackend().restart("12", Submission(run)) == "4711"
    fake_slurm.answers("squeue", stdout=f"14|{run.path}|\n{others}")
    assert SlurmBackend().restart("12", Submission(run)) == "14"
    assert SlurmBackend().restart("12_3", Submission(run)) == "14"
    # Without an answer it is unknown whether a job was made, so nothing is submitted.
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    with pytest.raises(CommandFailed):
        SlurmBackend().restart("12", Submission(run))
    assert len(fake_slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("job_id", ["", "-1", "1;2", "1,2", "$(x)", "1 2", "local-3", "1_[2-3]"])
def test_invalid_job_ids_never_reach_the_commands(job_id: str, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(SchedulerError, match="not a Slurm job id"):
        SlurmBackend().cancel(job_id)
    assert fake_slurm.calls("scancel") == []


def test_current_job_and_nodes_come_from_the_environment() -> None:
    backend = SlurmBackend()
    assert backend.current_job_id({"SLURM_JOB_ID": "5"}) == "5"
    array = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert backend.current_job_id(array) == "5_2"
    assert backend.current_job_id({}) is None and backend.current_nodes({}) == ()
    assert backend.current_nodes({"SLURM_JOB_NODELIST": "n[1-2]"}) == ("n1", "n2")


def test_working_directory_comes_from_squeue_or_sacct(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("squeue", stdout="/shared/a b/runs/x|\n")
    assert find_work_dir("5") == Path("/shared/a b/runs/x")
    fake_slurm.answers("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    assert find_work_dir("5") is None
    fake_slurm.answers("sacct", stdout="/shared/old\n")
    assert find_work_dir("5") == Path("/shared/old")


def test_version_is_none_without_sbatch(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm.answers("sbatch", stdout="")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert SlurmBackend().sbatch_version() is None


def test_directives_override_sbatch_environment_variables(
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

"""The run of `clustertrain wrap`: created with the sizes of the allocation, and found again after a requeue."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clustertrain.errors import UsageError
from clustertrain.run import attempts, events
from clustertrain.run.attempts import Attempt
from clustertrain.run.events import EventLog
from clustertrain.run.run_spec import load_command, load_spec
from clustertrain.scheduler.slurm import SlurmBackend
from clustertrain.scheduler.slurm_parse import JobFacts, parse_job_facts
from clustertrain.scheduler.slurm_step import StepTask
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.wrapped_run import Entry, choose_entry, complete_request, open_wrapped_run
from tests.fakes.slurm.fixture import FakeSlurm

TASK = StepTask(
    job_id="17", cluster="c", restart=0, step="0-1", nodes=("n1", "n2"), node_rank=0, local_rank=0, tasks_per_node=1,
    num_gpus=4,
)  # fmt: skip
# Printed by Slurm 22.05; the name and the comment are the user's.
JOB = """JobId=17 JobName=x Requeue=0 StdOut=/no
   UserId=a(1) GroupId=a(1) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-00:05:00 TimeMin=N/A
   Comment=Requeue=0 BatchFlag=0
   StdErr=/home/a/my job.err
   StdOut=/home/a/my job.out
   Power=
"""


def request(tmp_path: Path, *command: str, **job: Any) -> SubmitRequest:
    (tmp_path / "train.py").write_text("pass\n")
    return SubmitRequest(command=command or (sys.executable, "train.py"), job=job, cwd=tmp_path, argv=("wrap",))


def end_attempt(run: Any, n: int, ending: str) -> None:
    attempt = run.attempt(n)
    attempt.path.mkdir()
    log = EventLog(attempt.events_path("batch"))
    log.write("ended", ending=ending, reason="", last_step=None, job_id="17")
    log.close()


@pytest.mark.long
def test_run_is_created_with_the_sizes_of_the_step_and_found_after_the_requeue(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    output = tmp_path / "slurm-17.out"
    output.write_text("printed by the script\n")
    fake_slurm.answers("scontrol", stdout=JOB.replace("/home/a/my job.out", str(output)))
    asked = request(tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "-x")
    backend = SlurmBackend()
    first = open_wrapped_run(replace(asked, environ={**asked.environ, "SLURM_JOB_QOS": "high"}), TASK, backend)
    spec, command = load_spec(first.run), load_command(first.run)
    assert (spec.wrapped, spec.job.nodes, spec.job.gpus, spec.job.device) == (True, 2, 2, "cuda")
    assert (spec.job.time, spec.job.qos) == ("1-00:05:00", "high")
    assert command is not None and command.command[1:] == ("train.py", "-x")
    script = first.run.job_script.read_text()
    assert "#SBATCH" not in script and script.endswith('exec "$agent_python" -P -m clustertrain agent\n')
    assert first.run.job_log.read_text() == "printed by the script\n"
    (submitted,) = events.for_run(first.run)
    assert (submitted["event"], submitted["job_id"]) == ("submitted", "17")
    assert not fake_slurm.calls("sbatch")
    end_attempt(first.run, 1, "preempted")
    # The same step of the next start; another command is a run of its own; a repetition of it too.
    again = open_wrapped_run(asked, replace(TASK, restart=1, step="0-9"), backend)
    assert (again.run, again.is_complete) == (first.run, False)
    end_attempt(first.run, 2, "completed")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "gpu")  # those of the step
    other = open_wrapped_run(request(tmp_path, *launcher, "train.py"), replace(TASK, restart=1, step="1-9"), backend)
    assert other.run != first.run and load_spec(other.run).job.gpus == 4
    assert open_wrapped_run(asked, replace(TASK, restart=2), backend).is_complete
    # The job id of another job, before Slurm's database was erased.
    fake_slurm.answers("squeue", stdout="17|RUNNING|0|4000000000|4000009999|N/A|n[1-2]|None|\n")
    assert open_wrapped_run(asked, TASK, backend).run not in (first.run, other.run)


A = "a"


@pytest.mark.parametrize(
    ("entries", "restart", "endings", "chosen"),
    [
        ([(A, 0)], 1, ["preempted"], 0),
        ([(A, 0)], 1, [None], 0),  # killed with its node
        ([(A, 0)], 1, ["completed"], 0),
        ([(A, 1), (A, 0)], 1, ["completed", "preempted"], 1),  # the second of two equal steps
        ([(A, 0)], 0, ["completed"], None),  # the script repeats the command
        ([(A, 0)], 0, ["failed"], 0),  # the script tries again
        ([(A, 0)], 0, [None], None),  # two equal steps at a time
        ([("date-1", 0)], 1, ["preempted"], 0),  # $(date) in the command
        ([("date-1", 0), ("b", 0)], 1, ["preempted", "preempted"], None),
        ([("prepare", 0)], 1, ["completed"], None),
        ([("b", 1)], 1, ["preempted"], None),  # continued by another step of this start
    ],
)
def test_which_run_a_step_continues(
    entries: list[tuple[str, int]], restart: int, endings: list[str | None], chosen: int | None
) -> None:
    stored = [Entry(number=i, run=str(i), command=command, restart=r) for i, (command, r) in enumerate(entries)]
    history = {entry.number: attempt(ending) for entry, ending in zip(stored, endings, strict=True)}
    entry, note = choose_entry(stored, A, replace(TASK, restart=restart), lambda e: history[e.number])
    assert (entry.number if entry else None) == chosen
    assert bool(note) == (entry is not None and entry.command != A)


def attempt(ending: str | None) -> Attempt:
    empty: dict[str, Any] = {field.name: None for field in msgspec.structs.fields(Attempt) if field.required}
    return attempts.Attempt(**{**empty, "n": 1, "ending": ending})


@pytest.mark.parametrize(
    ("command", "options", "task", "ranks"),
    [
        (("torchrun", "--nproc-per-node", "2"), {}, TASK, 2),
        (("torchrun", "--nproc-per-node", "gpu"), {}, TASK, 4),
        ((), {}, TASK, 4),
        ((), {"gpus": 3}, TASK, 3),
        ((), {}, replace(TASK, num_gpus=0), 1),
        ((), {}, replace(TASK, tasks_per_node=8), 8),
    ],
)
def test_ranks_per_node(
    tmp_path: Path, command: tuple[str, ...], options: dict[str, int], task: StepTask, ranks: int
) -> None:
    from clustertrain.submit.launchers.replace import replace_launcher

    asked = replace_launcher(replace(request(tmp_path, *command, "train.py", **options), wrapped=True)).request
    completed = complete_request(replace(asked, environ={"SLURM_CPUS_ON_NODE": "33"}), task, JobFacts())
    assert (completed.job["nodes"], completed.job["gpus"]) == (2, ranks)
    assert completed.job.get("cpus_per_gpu") == (4 if task.tasks_per_node == 8 else None)
    assert completed.job["device"] == ("cuda" if task.num_gpus else "cpu")


@pytest.mark.parametrize(
    ("launcher", "options", "tasks", "message"),
    [
        (("torchrun", "--nnodes", "4"), {}, 1, "given 4 nodes, and the step has 2"),
        (("torchrun", "--nproc-per-node", "4"), {}, 8, "the launcher asks for 4 ranks per node, and srun starts 8"),
        ((), {"gpus": 4}, 8, "--gpus asks for 4 ranks per node, and srun starts 8"),
    ],
)
def test_contradicting_sizes(
    fake_slurm: FakeSlurm, tmp_path: Path, launcher: tuple[str, ...], options: dict[str, int], tasks: int, message: str
) -> None:
    asked = request(tmp_path, *launcher, sys.executable, "train.py", **options)
    with pytest.raises(UsageError, match=message):
        open_wrapped_run(asked, replace(TASK, tasks_per_node=tasks), SlurmBackend())
    assert not (tmp_path / "home" / "runs").exists()


def test_facts_of_a_job() -> None:
    assert parse_job_facts(JOB) == JobFacts(True, True, "1-00:05:00", "/home/a/my job.out")
    changed = JOB.replace("   Requeue=1", "   Requeue=0").replace("BatchFlag=1", "BatchFlag=0")
    changed = changed.replace("TimeLimit=1-00:05:00", "TimeLimit=UNLIMITED")
    assert parse_job_facts(changed) == JobFacts(False, False, "", "/home/a/my job.out")
    assert parse_job_facts("") == JobFacts()


def test_image_of_the_profile_is_not_for_a_script_of_the_user(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.toml").write_text('container = "/images/x.sif"\nenvironment = "ship"\n')
    fake_slurm.answers("scontrol", stdout=JOB)
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER_PATH", str(tmp_path))
    wrapped = open_wrapped_run(request(tmp_path, cluster="site"), TASK, SlurmBackend())
    job = load_spec(wrapped.run).job
    assert (job.container, job.environment) == ("", "shared")

"""`clustertrain wrap` in the user's own batch scripts: preempted, at the time limit, and in a job without requeue."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.paths import ROOT
from tests.runs import Run

pytestmark = pytest.mark.slurm
PROGRAM = ROOT / "tests" / "fixtures" / "programs" / "attached_loop.py"
WRAP = f"{sys.executable} -m clustertrain wrap"
SCRIPT = """
echo "before ${{SLURM_RESTART_COUNT:-0}}"
{commands}
echo "after $?"
"""


class Job:
    """A job that was submitted with sbatch, and its run."""

    def __init__(self, run: Run, output: Path) -> None:
        self.run, self.output = run, output

    def read_steps(self, attempt: int, rank: int) -> list[int]:
        log = self.run.path / "attempts" / str(attempt) / "logs" / f"rank-{rank}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("STEP ")]

    def read_output(self) -> str:
        """Return what the script has printed, after its last line."""
        clock.wait_until(lambda: "\nafter " in self.output.read_text(), 60.0, 0.5)
        return self.output.read_text()

    def wait_for_steps(self, attempt: int, ranks: int, steps: int = 1) -> None:
        self.run.wait_for(
            lambda _: all(len(self.read_steps(attempt, rank)) >= steps for rank in range(ranks)),
            f"{steps} steps of {ranks} ranks in attempt {attempt}",
        )


@pytest.fixture
def sbatch(env: dict[str, str], submit: Callable[..., str], tmp_path: Path) -> Callable[..., Job]:
    """Return a function that submits a script and waits for its run."""
    (tmp_path / PROGRAM.name).write_text(PROGRAM.read_text())
    names = ("CLUSTERTRAIN_HOME", "LD_LIBRARY_PATH", "NVML_STUB_DEVICES")
    export = f"--export=ALL,{','.join(f'{name}={env[name]}' for name in names)}"

    def submit_script(commands: str, *options: str) -> Job:
        output = tmp_path / "slurm.out"
        job_id = submit(SCRIPT.format(commands=commands), f"--output={output}", export, *options)
        answers: list[dict[str, str]] = []

        def has_run() -> bool:
            done = runs.call(env, "list", "--json")
            answers.extend(r for r in json.loads(done.stdout)["runs"] if r["job_id"] == job_id)
            return bool(answers)

        assert clock.wait_until(has_run, 120.0, 1.0), output.read_text() if output.exists() else "not started"
        folder = Path(env["CLUSTERTRAIN_HOME"], "runs", answers[0]["run"])
        return Job(Run(env, {**answers[0], "run_dir": str(folder)}), output)

    return submit_script


def test_preempted_job_is_requeued_and_completes(
    sbatch: Callable[..., Job], preempt: Callable[[Run], None], tmp_path: Path
) -> None:
    launcher = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-endpoint node01:29500"
    job = sbatch(
        f"srun {WRAP} --name mine -- {launcher} {PROGRAM.name} out 600", "-N2", "--gpus-per-node=1", "--time=30"
    )
    job.wait_for_steps(1, ranks=2, steps=20)
    preempt(job.run)
    status = job.run.complete()
    assert job.run.id.startswith("mine-")
    assert job.run.endings() == ["preempted", "completed"], job.run.explain()
    stopped = [job.read_steps(1, rank)[-1] for rank in (0, 1)]
    assert stopped[0] == stopped[1] == job.read_steps(2, 0)[0] - 1 == job.read_steps(2, 1)[0] - 1
    assert {attempt["job_id"] for attempt in status["attempts"]} == {job.run.job_id}
    # Rank 0's output is in the job's own output. The script was killed at the requeue, and went on at the end.
    lines = job.read_output().splitlines()
    assert sum(line.startswith("STEP ") for line in lines) == 600
    assert [line for line in lines if line.startswith(("before", "after"))] == ["before 0", "before 1", "after 0"]
    report = json.loads(job.run.call("telemetry", job.run.job_id, "--json").stdout)
    assert {gpu["node"] for gpu in report["gpus"]} == {"node01", "node02"}
    assert all(gpu["power_w"]["mean"] > 0 for gpu in report["gpus"]), report


def test_several_tasks_per_node_are_the_ranks_and_stop_at_the_time_limit(sbatch: Callable[..., Job]) -> None:
    command = f"{WRAP} -- {sys.executable} {PROGRAM.name} out 1000000"
    job = sbatch(
        f"srun --gpus-per-task=1 {command}\necho refused $?\nsrun {command}",
        "-N2", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=2", "--signal=USR1@30",
    )  # fmt: skip
    job.wait_for_steps(2, ranks=4)
    first, _ = attempts.load_attempts(RunDir(job.run.path))
    assert first.ending == "time_limit", job.run.explain()
    assert {job.read_steps(1, rank)[-1] for rank in range(4)} == {first.committed_step}
    assert {job.read_steps(2, rank)[0] for rank in range(4)} == {first.committed_step + 1}
    lines = job.output.read_text().splitlines()  # the script goes on for ever
    assert lines.count("refused 2") == 2
    assert any("SLURMD_TRES_BIND=gpu:per_task:1" in line for line in lines)
    job.run.call("cancel", job.run.id)
    job.run.wait_until_final()


def test_job_without_requeue_says_so_and_ends(sbatch: Callable[..., Job], preempt: Callable[[Run], None]) -> None:
    # Without srun: wrap starts the step itself, since Slurm warns only steps.
    command = f"{WRAP} -- {sys.executable} {PROGRAM.name} out 1000000"
    job = sbatch(command, "-N1", "--ntasks-per-node=2", "--time=30", "--no-requeue")
    job.wait_for_steps(1, ranks=1, steps=5)
    preempt(job.run)
    status = job.run.wait_until_final()
    assert status["state"] == "failed"
    text = job.read_output()
    assert "the run will not be requeued: the job was submitted with --no-requeue" in text
    assert text.endswith("after 93\n"), text
    assert job.run.endings() == ["preempted"]
    assert attempts.load_attempts(RunDir(job.run.path))[0].committed_step == job.read_steps(1, 0)[-1]

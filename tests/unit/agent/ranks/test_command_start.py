"""What the ranks of a command execute."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.agent.ranks.command_start import RANK_HOOKS, build_command, build_environment, build_resume_arguments
from clustertrain.config.job import JobSpec, ScriptSpec
from clustertrain.run.run_dir import RunDir

SCRIPT = ScriptSpec(path="train.py", cwd="/tmp", command=("python", "/home/u/train.py", "--lr", "1"), path_index=1)


@pytest.mark.parametrize(
    ("job", "attempt", "checkpoint", "added"),
    [
        ({"resume_args": "--resume"}, 1, "/c p.pt", []),
        ({"resume_args": "--resume"}, 2, "", ["--resume"]),  # nothing says whether there is one
        ({"resume_args": "--resume", "checkpoints": "out/*"}, 2, "", []),
        ({"resume_args": "--resume", "checkpoints": "out/*"}, 2, "/c p.pt", ["--resume"]),
        ({"resume_args": "--from {checkpoint}"}, 2, "", []),
        (
            {"resume_args": "--from {checkpoint} '--name=a b' --json '{\"n\": 1}' {attempt} {run_dir}/x"},
            3,
            "/c p.pt",
            ["--from", "/c p.pt", "--name=a b", "--json", '{"n": 1}', "3", "/run/x"],
        ),
        ({}, 2, "/c p.pt", []),
    ],
)
def test_resumed_attempt_has_further_arguments(
    job: dict[str, str], attempt: int, checkpoint: str, added: list[str]
) -> None:
    run = RunDir(Path("/run"))
    assert build_command(SCRIPT, run) == ["python", "/run/code/train.py", "--lr", "1"]
    arguments = build_resume_arguments(JobSpec(**job), run, run.attempt(attempt), checkpoint)  # type: ignore[arg-type]
    assert arguments == added


def test_environment_names_signal_grace_time_and_checkpoint() -> None:
    inherited = {"PYTHONPATH": "/code", "CLUSTERTRAIN_CHECKPOINT": "of the submitting shell"}
    job = JobSpec(stop_signal="USR1:all")
    env = build_environment(inherited, SCRIPT, job, checkpoint="", grace_s=None)
    assert env == {"PYTHONPATH": f"{RANK_HOOKS}:/code", "CLUSTERTRAIN_STOP_SIGNAL": "USR1"}
    env = build_environment({}, SCRIPT, JobSpec(hooks=False), checkpoint="/c", grace_s=120.0)
    assert env == {
        "CLUSTERTRAIN_STOP_SIGNAL": "TERM", "CLUSTERTRAIN_CHECKPOINT": "/c", "CLUSTERTRAIN_GRACE_S": "120"
    }  # fmt: skip

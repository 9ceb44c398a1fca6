"""The place of a task in a user's own job step, from Slurm's variables, and the layouts that are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.errors import UsageError
from clustertrain.scheduler.slurm_step import is_in_step, read_step_task, start_step

# Recorded with Slurm 22.05: task 2 of `srun` with --nodes=2 --ntasks-per-node=2 --gpus-per-node=2.
ENV = {
    "CUDA_VISIBLE_DEVICES": "0,1",
    "SLURMD_NODENAME": "node02",
    "SLURM_CLUSTER_NAME": "testbed",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[01-03]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_STEP_GPUS": "0,1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_LAUNCHER_PORT": "39523",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_task_of_the_second_node() -> None:
    task = read_step_task(ENV)
    assert (task.job_id, task.cluster, task.restart, task.step) == ("17", "testbed", 3, "1-39523")
    assert (task.nodes, task.node, task.node_rank, task.local_rank) == (("node01", "node02"), "node02", 1, 0)
    assert (task.tasks_per_node, task.num_gpus, task.is_first) == (2, 2, False)


def test_first_start_of_an_array_task_without_gpus() -> None:
    first = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4"}
    env = {**ENV, **first, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    del env["SLURM_RESTART_COUNT"]
    task = read_step_task(env)
    assert (task.job_id, task.restart, task.num_gpus, task.is_first) == ("9_4", 0, 0, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, r"different numbers of tasks \(3,1\)"),
        ({"SLURM_HET_SIZE": "2"}, "several components"),
        ({"CLUSTERTRAIN_RUN_DIR": "/runs/a"}, "inside a run of clustertrain"),
        ({"SLURM_PROCID": "0"}, "not on the first node"),
        ({"SLURM_GPUS_PER_TASK": "1"}, "SLURM_GPUS_PER_TASK=1"),
        ({"SLURMD_TRES_BIND": "gpu:closest"}, "SLURMD_TRES_BIND=gpu:closest"),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:1"}, "SLURM_TRES_PER_TASK=gres/gpu:1"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "a task sees 1 of 2 GPUs"),
    ],
)
def test_refused_step(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        read_step_task({**ENV, **changes})
    assert raised.value.fix


def test_refused_outside_a_job() -> None:
    with pytest.raises(UsageError, match=r"not inside a Slurm job\n.*in a batch script: srun clustertrain wrap -- "):
        start_step({}, ["true"])


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_TASK": "2"},
        {"SLURMD_TRES_BIND": "gpu:none"},
        {"SLURM_TRES_PER_TASK": "cpu=4"},
        {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "0"},
    ],
)
def test_step_whose_first_task_sees_all_gpus(changes: dict[str, str]) -> None:
    assert read_step_task({**ENV, **changes}).nodes == ("node01", "node02")


@pytest.mark.parametrize("step", ["", "4294967291", "4294967290"])
def test_batch_script_and_shell_of_salloc_are_no_step(step: str) -> None:
    assert not is_in_step({**ENV, "SLURM_STEP_ID": step})
    assert is_in_step(ENV)


def wrap(env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clustertrain", "wrap", *argv]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.long
def test_outside_a_step(tmp_path: Path) -> None:
    """In a batch script of one node, wrap starts srun; elsewhere it says what to do."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@" "[$SLURM_GPUS_PER_TASK]"\n')
    (tmp_path / "srun").chmod(0o755)
    batch = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_GPUS_PER_TASK": "1", "PATH": str(tmp_path)}
    started = wrap({**batch, "SLURM_JOB_NODELIST": "node01"}, "--name", "a b", "--", "train", "--lr", "1")
    assert started.stdout.startswith("--nodes=1 --ntasks=1 "), started
    assert started.stdout.endswith(f"{sys.executable} -P -m clustertrain wrap --name a b -- train --lr 1 []\n"), started
    several = wrap({**batch, "SLURM_JOB_NODELIST": "node[01-02]"}, "--", "train")
    assert (several.returncode, several.stdout) == (2, "")
    assert "the job has 2 nodes" in several.stderr and "put srun before it" in several.stderr
    outside = wrap({}, "--", "train")
    assert outside.returncode == 2 and "clustertrain submit -- COMMAND" in outside.stderr

"""The tasks of one node: they wait for the first one, which gets their cores, and exit with its code."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest

from clustertrain.agent.wrap.node_tasks import NodeTasks, wait_for_first_task
from clustertrain.scheduler.slurm_step import StepTask


@pytest.fixture
def task() -> StepTask:
    return StepTask(
        job_id=uuid4().hex[:8], cluster="c", restart=0, step="0-1", nodes=("n1",), node_rank=0, local_rank=0,
        tasks_per_node=3, num_gpus=0,
    )  # fmt: skip


@pytest.fixture
def cores() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def start_others(task: StepTask, codes: list[int]) -> list[threading.Thread]:
    others = [replace(task, local_rank=rank) for rank in (1, 2)]
    threads = [threading.Thread(target=lambda t=other: codes.append(wait_for_first_task(t))) for other in others]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("exit_code", [0, 93])
def test_others_exit_with_the_code_of_the_first(task: StepTask, cores: set[int], exit_code: int) -> None:
    codes: list[int] = []
    threads = start_others(task, codes)
    first = NodeTasks(task)
    os.sched_setaffinity(0, {min(cores)})  # as Slurm binds a task; the threads, started before, have all cores
    first.gather()
    assert os.sched_getaffinity(0) == cores
    assert codes == []
    first.release(exit_code)
    for thread in threads:
        thread.join(30)
    assert codes == [exit_code] * 2


def test_killed_first_task_is_a_failure(task: StepTask) -> None:
    codes: list[int] = []
    threads = start_others(task, codes)
    first = NodeTasks(task)
    first.gather()
    first.close()  # as the kernel does
    for thread in threads:
        thread.join(30)
    assert codes == [1, 1]

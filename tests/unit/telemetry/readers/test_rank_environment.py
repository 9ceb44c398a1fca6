"""Ranks by the environment of their processes, as torchrun, srun and mpirun set it."""

from __future__ import annotations

import pytest

from clustertrain.telemetry.readers.nvml import Device
from clustertrain.telemetry.readers.rank_environment import (
    FoundRank,
    JobProcess,
    assign_ranks,
    find_ranks,
    parse_environ,
)

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


def torch_rank(pid: int, parent: int, rank: int, local: int, world: int = 16, port: str = "29500") -> JobProcess:
    environ = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world), "MASTER_PORT": port}
    # srun has started torchrun, whose number all of its ranks inherit.
    return JobProcess(pid, parent, {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", **environ})


def srun_task(pid: int, parent: int, number: int, local: int, step: str = "0") -> JobProcess:
    environ = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(local), "SLURM_STEP_ID": step}
    return JobProcess(pid, parent, {**STEP, **environ})


def numbers(processes: list[JobProcess]) -> list[tuple[int, int, int | None, int]]:
    return [(r.rank, r.world_size, r.local_rank, r.pid) for r in find_ranks(processes)]


def test_ranks_of_torchrun_below_srun() -> None:
    launcher = srun_task(10, 1, 1, 0)
    ranks = [torch_rank(20 + i, 10, 8 + i, i) for i in range(8)]
    assert numbers([launcher, *ranks]) == [(8 + i, 16, i, 20 + i) for i in range(8)]


def test_data_workers_are_not_ranks_although_they_inherit_the_variables() -> None:
    rank, worker, compiler = torch_rank(20, 10, 0, 0), torch_rank(15, 20, 0, 0), torch_rank(31, 15, 0, 0)
    assert numbers([worker, compiler, rank]) == [(0, 16, 0, 20)]


def test_tasks_of_srun_are_ranks() -> None:
    script = JobProcess(5, 1, BATCH)
    assert numbers([script, srun_task(20, 1, 2, 0), srun_task(21, 1, 3, 1)]) == [(2, 4, 0, 20), (3, 4, 1, 21)]


def test_batch_script_alone_has_no_ranks() -> None:
    assert numbers([JobProcess(5, 1, BATCH), JobProcess(6, 5, BATCH)]) == []


def test_ranks_of_open_mpi() -> None:
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"))}
    assert numbers([JobProcess(9, 1, {**BATCH, **environ})]) == [(3, 4, 1, 9)]


def test_largest_of_several_programs_counts() -> None:
    training = [torch_rank(20 + i, 10, i, i, world=8) for i in range(8)]
    evaluation = [torch_rank(90, 10, 0, 0, world=1, port="1234")]
    assert numbers([*evaluation, *training]) == [(i, 8, i, 20 + i) for i in range(8)]


def test_newest_of_equal_programs_counts() -> None:
    first, second = srun_task(20, 1, 0, 0, step="0"), srun_task(40, 1, 0, 0, step="1")
    assert numbers([second, first]) == [(0, 4, 0, 40)]


@pytest.mark.parametrize(
    ("rank", "world"), [("-1", "4"), ("4", "4"), ("x", "4"), ("0", ""), ("", "4"), ("1" * 30, "1" * 31), ("²", "4")]
)
def test_invalid_number_is_not_a_rank(rank: str, world: str) -> None:
    assert numbers([JobProcess(9, 1, {"RANK": rank, "WORLD_SIZE": world})]) == []


def test_only_known_variables_are_kept() -> None:
    data = b"RANK=3\0API_TOKEN=secret\0PATH=/bin\0SLURM_JOB_ID=7\0broken\0\0WORLD_SIZE=4\xff"
    assert parse_environ(data) == {"RANK": "3", "SLURM_JOB_ID": "7", "WORLD_SIZE": "4\ufffd"}


def devices(*indices: int) -> list[Device]:
    return [Device(uuid=f"GPU-{i}", index=i, minor=i) for i in indices]


def ranks(*visible: str | None) -> list[FoundRank]:
    return [FoundRank(10 + i, 99, i, 100 + i, names) for i, names in enumerate(visible)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        pytest.param((None, None), {"GPU-4": [10], "GPU-6": [11]}, id="local ranks in the order of the allocation"),
        pytest.param(("4,6", "4,6"), {"GPU-4": [10], "GPU-6": [11]}, id="each sees all"),
        pytest.param(("6", "4"), {"GPU-6": [10], "GPU-4": [11]}, id="numbers on the node"),
        pytest.param(("1", "0"), {"GPU-6": [10], "GPU-4": [11]}, id="positions in the allocation"),
        pytest.param(("0", "0"), {"GPU-4": [10], "GPU-6": [11]}, id="each sees its own as number 0"),
        pytest.param(("GPU-6", "gpu-4"), {"GPU-6": [10], "GPU-4": [11]}, id="UUIDs"),
        pytest.param(("", ""), {"GPU-4": [10], "GPU-6": [11]}, id="an empty list names none"),
        pytest.param((None, None, None), {"GPU-4": [10], "GPU-6": [11]}, id="more ranks than GPUs"),
    ],
)
def test_gpu_of_a_rank(visible: tuple[str | None, ...], expected: dict[str, list[int]]) -> None:
    assert assign_ranks(ranks(*visible), devices(4, 6)) == expected


def test_rank_on_a_node_without_gpus() -> None:
    assert assign_ranks(ranks(None), []) == {}

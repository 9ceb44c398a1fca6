from __future__ import annotations

import os
from pathlib import Path

import pytest

from clustertrain.telemetry.readers.allocation import find_allocation, read_host_allocation
from clustertrain.telemetry.readers.nvml import Device


def node(count: int, *, minors: list[int | None] | None = None) -> list[Device]:
    return [Device(f"GPU-{i}aaa-bbb", index=i, minor=(minors or list(range(count)))[i]) for i in range(count)]


def allocated_indices(environ: dict[str, str], devices: list[Device]) -> list[int | None]:
    allocation = find_allocation(environ, devices).devices
    assert all(d.reason is None for d in allocation)
    return [d.index for d in allocation]


def test_cgroup_renumbers_visible_gpus() -> None:
    """slurm-job-exporter#63: the job's numbers count on the node, NVML's indices in the cgroup."""
    inside = node(2, minors=[4, 5])
    assert allocated_indices({"SLURM_STEP_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, inside) == [0, 1]
    assert allocated_indices({"SLURM_JOB_GPUS": "4,5"}, inside) == [0, 1]


def test_gpus_that_a_cgroup_hides_are_not_the_jobs() -> None:
    """nvml.h: nvmlDeviceGetCount counts GPUs that nvmlDeviceGetHandleByIndex refuses with NO_PERMISSION."""
    hidden = [Device(f"unreadable-{i}", index=i, reason="NO_PERMISSION: refused") for i in range(4)]
    listed = [*hidden, *(Device(f"GPU-{i}", index=i, minor=i) for i in (4, 5))]
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"SLURM_STEP_GPUS": "4,5"}, {"SLURM_JOB_GPUS": "0,1"}):
        assert allocated_indices(environ, listed) == [4, 5]
    # Where all are refused, the job has GPUs that it cannot open.
    assert find_allocation({}, hidden).devices == hidden


def test_minor_number_differs_from_index() -> None:
    """jobstats#34: boards where /dev/nvidia0 is not NVML's first."""
    crossed = node(4, minors=[2, 3, 0, 1])
    assert allocated_indices({"SLURM_STEP_GPUS": "0,1"}, crossed) == [2, 3]


@pytest.mark.parametrize("value", ["GPU-2aaa-bbb,GPU-0aaa-bbb", "GPU-2,GPU-0", "gpu-2aaa,gpu-0aaa"])
def test_uuids_take_precedence_in_order(value: str) -> None:
    """slurm-operator#112: Slurm 25.11 names GPUs by UUID; CUDA also accepts prefixes."""
    assert allocated_indices({"CUDA_VISIBLE_DEVICES": value, "SLURM_STEP_GPUS": "1,3"}, node(4)) == [2, 0]


def test_mig_slices_selected_by_uuid() -> None:
    devices = [
        *node(2),
        Device("MIG-1111", index=1, parent="GPU-1aaa-bbb"),
        Device("MIG-2222", index=1, parent="GPU-1aaa-bbb"),
    ]
    allocation = find_allocation({"CUDA_VISIBLE_DEVICES": "MIG-2222"}, devices)
    assert [d.uuid for d in allocation.devices] == ["MIG-2222"]
    # A GPU in MIG mode cannot be allocated whole: without variables, its slices replace it.
    assert [d.uuid for d in find_allocation({}, devices).devices] == ["GPU-0aaa-bbb", "MIG-1111", "MIG-2222"]


def test_step_gpus_precede_job_gpus() -> None:
    """srun hands the batch host's SLURM_JOB_GPUS to every node."""
    assert allocated_indices({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "2,3"}, node(4)) == [2, 3]


def test_batch_host_numbers_on_constrained_node() -> None:
    assert allocated_indices({"SLURM_JOB_GPUS": "0,1"}, node(2, minors=[6, 7])) == [0, 1]


def test_index_used_without_minor_numbers() -> None:
    allocation = find_allocation({"SLURM_STEP_GPUS": "1,3"}, node(4, minors=[None] * 4))
    assert [d.index for d in allocation.devices] == [1, 3]
    assert allocation.source == "SLURM_STEP_GPUS, by index"


def test_number_ranges() -> None:
    assert allocated_indices({"SLURM_STEP_GPUS": "0-2,5"}, node(8)) == [0, 1, 2, 5]


def test_indices_outside_slurm() -> None:
    assert allocated_indices({"CUDA_VISIBLE_DEVICES": "3,1"}, node(4)) == [3, 1]
    # As many as NVML lists, numbered as on the whole node.
    assert allocated_indices({"CUDA_VISIBLE_DEVICES": "4,5"}, node(2)) == [0, 1]


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_no_visible_devices(value: str) -> None:
    assert find_allocation({"CUDA_VISIBLE_DEVICES": value}, node(4)).devices == []


def test_all_gpus_without_variables() -> None:
    assert allocated_indices({}, node(3)) == [0, 1, 2]


def test_missing_allocated_gpu_is_listed() -> None:
    allocation = find_allocation({"SLURM_STEP_GPUS": "0,1,2,3"}, node(3, minors=[0, 1, 3])).devices
    assert [d.index for d in allocation] == [0, 1, None, 2]
    assert allocation[2].uuid == "missing-minor-2"
    assert "no device with minor 2" in str(allocation[2].reason)
    (missing,) = find_allocation({"CUDA_VISIBLE_DEVICES": "GPU-9999"}, node(2)).devices
    assert (missing.uuid, missing.reason) == ("GPU-9999", "NOT_FOUND: NVML does not list it")


def test_ambiguous_uuid_prefix() -> None:
    (device,) = find_allocation({"CUDA_VISIBLE_DEVICES": "GPU-"}, node(2)).devices
    assert "ambiguous prefix of 2 devices" in str(device.reason)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("environ", "cpus", "memory"),
    [
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_MEM_PER_NODE": "65536"}, 32, 64 * GIB),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_CPU": "2048"}, 8, 16 * GIB),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "4", "SLURM_MEM_PER_GPU": "4096"}, 8, 16 * GIB),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_NODE": "0"}, 8, None),  # all memory
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_NODE": "many"}, 8, None),
    ],
    ids=["per-node", "per-cpu", "per-gpu", "zero-is-all", "invalid"],
)
def test_host_allocation_from_slurm(tmp_path: Path, environ: dict[str, str], cpus: int, memory: int | None) -> None:
    assert read_host_allocation(environ, tmp_path) == (cpus, memory)


def test_host_allocation_outside_slurm(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/user.slice/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/job\n")
    (group / "memory.max").write_text("max\n")
    cpus = len(os.sched_getaffinity(0))
    assert read_host_allocation({}, tmp_path) == (cpus, None)
    (group.parent / "memory.max").write_text(f"{8 * GIB}\n")
    assert read_host_allocation({}, tmp_path) == (cpus, 8 * GIB)
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    assert read_host_allocation({}, tmp_path) == (cpus, 4 * GIB)


def test_cgroup_v1_limits(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory/slurm/job_7"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/\n3:memory:/slurm/job_7\n")
    (group / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (group.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_host_allocation({}, tmp_path).memory_bytes == 2 * GIB

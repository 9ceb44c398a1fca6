"""GPUs, processors and memory of the node that are allocated to the job, whether used or not.

Meaning of the variables, and why indices alone are ambiguous:

- CUDA_VISIBLE_DEVICES holds UUIDs (Slurm 25.11 and later, MIG), or CUDA indices. Indices count inside the cgroup if
  Slurm constrains devices, and on the whole node otherwise.
- SLURM_STEP_GPUS and SLURM_JOB_GPUS hold the N of /dev/nvidiaN, the minor number, which differs from NVML's index on
  some boards and inside a cgroup. srun passes the batch host's SLURM_JOB_GPUS to every node, so SLURM_STEP_GPUS takes
  precedence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from clustertrain import reading, settings
from clustertrain.telemetry.readers.nvml import Device

_NO_DEVICE = ("-1", "NoDevFiles", "void", "none")


class Allocation(msgspec.Struct, frozen=True):
    """GPUs allocated to the job on this node."""

    devices: list[Device]
    """In the order of the local ranks; a device that NVML does not list has a ``reason``."""
    source: str | None
    """Description of the variable that names the devices."""


def find_allocation(environ: Mapping[str, str], devices: Sequence[Device]) -> Allocation:
    """Select the allocated ones of NVML's ``devices`` by the rules above. Pure."""
    visible = environ.get(settings.CUDA_VISIBLE_DEVICES)
    tokens = _split_tokens(visible or "")
    if tokens and not all(reading.is_unsigned_int(t) or t in _NO_DEVICE for t in tokens):
        matched = _deduplicate([_find_by_uuid(t, devices) for t in tokens if t not in _NO_DEVICE])
        return Allocation(matched, f"UUIDs in {settings.CUDA_VISIBLE_DEVICES}")
    gpus = _allocatable_devices(devices)
    for variable in (settings.SLURM_STEP_GPUS, settings.SLURM_JOB_GPUS):
        numbers = _parse_numbers(environ.get(variable, ""))
        if numbers:
            return _allocate_by_number(numbers, variable, gpus)
    if visible is None:
        return Allocation(gpus, "all devices that NVML lists, as no variable names any")
    return _select_devices(
        _parse_numbers(visible), {d.index: d for d in gpus}, gpus, "index", settings.CUDA_VISIBLE_DEVICES
    )


def _split_tokens(value: str) -> list[str]:
    return [t.strip() for t in value.split(",") if t.strip()]


def _parse_numbers(value: str) -> list[int]:
    """Parse ``0,2-3`` as [0, 2, 3]; skip tokens that are not numbers."""
    numbers: list[int] = []
    for token in _split_tokens(value):
        first, _, last = token.partition("-")
        if reading.is_unsigned_int(first) and (reading.is_unsigned_int(last) or not last):
            numbers.extend(range(int(first), int(last or first) + 1))
    return list(dict.fromkeys(numbers))


def _deduplicate(devices: list[Device]) -> list[Device]:
    return list({d.uuid: d for d in devices}.values())


def _allocatable_devices(devices: Sequence[Device]) -> list[Device]:
    """Return the GPUs, each GPU in MIG mode replaced by its slices, which alone can be allocated.

    NVML counts the GPUs that a cgroup hides too, and refuses to open them. If it refuses all, none is hidden.
    """
    mig_parents = {d.parent for d in devices}
    gpus = [d for d in devices if d.uuid not in mig_parents]
    return [d for d in gpus if not (d.reason or "").startswith("NO_PERMISSION")] or gpus


def _find_by_uuid(token: str, devices: Sequence[Device]) -> Device:
    if reading.is_unsigned_int(token):
        index = int(token)
        return next((d for d in _allocatable_devices(devices) if d.index == index), None) or _missing_device(
            "index", index
        )
    # CUDA accepts any unique prefix; upper and lower case both occur.
    matches = [d for d in devices if d.uuid.lower().startswith(token.lower())]
    exact = [d for d in matches if d.uuid.lower() == token.lower()]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    reason = (
        "NOT_FOUND: NVML does not list it" if not matches else f"NOT_FOUND: ambiguous prefix of {len(matches)} devices"
    )
    return Device(uuid=token, reason=reason)


def _allocate_by_number(numbers: list[int], variable: str, gpus: list[Device]) -> Allocation:
    by_minor: dict[int | None, Device] = {d.minor: d for d in gpus if d.minor is not None}
    if len(by_minor) == len(gpus):
        return _select_devices(numbers, by_minor, gpus, "minor", variable)
    return _select_devices(numbers, {d.index: d for d in gpus}, gpus, "index", variable)


def _select_devices(
    numbers: list[int], devices_by_number: Mapping[int | None, Device], gpus: list[Device], id_type: str, variable: str
) -> Allocation:
    if not all(n in devices_by_number for n in numbers) and len(numbers) == len(gpus):
        # A cgroup hides the other GPUs and renumbers; or srun passed on the batch host's numbers.
        return Allocation(gpus, f"all devices that NVML lists, as many as in {variable}")
    return Allocation(
        [devices_by_number.get(n) or _missing_device(id_type, n) for n in numbers], f"{variable}, by {id_type}"
    )


def _missing_device(id_type: str, number: int) -> Device:
    return Device(uuid=f"missing-{id_type}-{number}", reason=f"NOT_FOUND: NVML lists no device with {id_type} {number}")


class HostAllocation(NamedTuple):
    """Processors and bytes of memory of the job on this node; None if unlimited or unknown."""

    cpus: int | None
    memory_bytes: int | None


def read_host_allocation(environ: Mapping[str, str], root: Path = Path("/")) -> HostAllocation:
    """Return Slurm's allocation, or without Slurm this process's limits; ``root`` contains ``proc`` and ``sys``."""
    cpus = _parse_count(environ, settings.SLURM_CPUS_ON_NODE) or len(os.sched_getaffinity(0))
    return HostAllocation(cpus, _slurm_memory_bytes(environ) or _cgroup_memory_bytes(root))


def _slurm_memory_bytes(environ: Mapping[str, str]) -> int | None:
    """Return the bytes on this node; None if Slurm does not set them, or sets 0 (all memory)."""
    per_node = _parse_count(environ, settings.SLURM_MEM_PER_NODE)
    per_cpu, cpus = (
        _parse_count(environ, settings.SLURM_MEM_PER_CPU),
        _parse_count(environ, settings.SLURM_CPUS_ON_NODE),
    )
    per_gpu, gpus = (
        _parse_count(environ, settings.SLURM_MEM_PER_GPU),
        _parse_count(environ, settings.SLURM_GPUS_ON_NODE),
    )
    mib = per_node or per_cpu * cpus or per_gpu * gpus
    return mib << 20 or None


def _parse_count(environ: Mapping[str, str], name: str) -> int:
    """Return the variable's value; 0 if it is unset or not a number."""
    value = environ.get(name, "")
    return int(value) if reading.is_unsigned_int(value) else 0


def _cgroup_memory_bytes(root: Path) -> int | None:
    """Return the lowest memory limit of this process's cgroups and their ancestors, in bytes."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        cgroup = base / path.lstrip("/")
        while cgroup != base.parent:
            limits.append(_read_limit(cgroup / file))
            cgroup = cgroup.parent
    known_limits = [n for n in limits if n is not None]
    return min(known_limits, default=None)


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    # No limit is "max" in cgroup v2, and the highest number of pages in v1.
    return int(text) if reading.is_unsigned_int(text) and int(text) < 1 << 60 else None

"""What of a node belongs to the job: GPUs, processors, memory. A GPU that no process uses is allocated all the same.

What the variables mean, and why plain indices go wrong:

- CUDA_VISIBLE_DEVICES holds UUIDs (Slurm 25.11 and later, MIG), or CUDA's indices, which count inside the cgroup where
  Slurm constrains devices and on the whole node where it does not.
- SLURM_STEP_GPUS and SLURM_JOB_GPUS hold the N of /dev/nvidiaN, the minor number, which differs from NVML's index on
  some boards and inside a cgroup. srun hands SLURM_JOB_GPUS of the batch host to every node, so the step's come first.
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
    """The job's devices in the order of the local ranks, and in ``how`` what named them.

    A device that is allocated but that NVML does not list stands in it with its ``reason``.
    """

    devices: list[Device]
    how: str | None


def find(environ: Mapping[str, str], devices: Sequence[Device]) -> Allocation:
    """The allocated ones of ``devices`` (what NVML lists), by the rules above. Pure."""
    visible = environ.get(settings.CUDA_VISIBLE_DEVICES)
    tokens = _tokens(visible or "")
    if tokens and not all(reading.is_count(t) or t in _NO_DEVICE for t in tokens):
        named = _distinct([_by_uuid(t, devices) for t in tokens if t not in _NO_DEVICE])
        return Allocation(named, f"UUIDs in {settings.CUDA_VISIBLE_DEVICES}")
    gpus = _leaves(devices)
    for variable in (settings.SLURM_STEP_GPUS, settings.SLURM_JOB_GPUS):
        numbers = _numbers(environ.get(variable, ""))
        if numbers:
            return _by_number(numbers, variable, gpus)
    if visible is None:
        return Allocation(gpus, "no variable names them: all that NVML lists")
    return _choose(_numbers(visible), {d.index: d for d in gpus}, gpus, "index", settings.CUDA_VISIBLE_DEVICES)


def _tokens(value: str) -> list[str]:
    return [t.strip() for t in value.split(",") if t.strip()]


def _numbers(value: str) -> list[int]:
    """``0,2-3`` as [0, 2, 3]; what is no number is left out."""
    found: list[int] = []
    for token in _tokens(value):
        first, _, last = token.partition("-")
        if reading.is_count(first) and (reading.is_count(last) or not last):
            found.extend(range(int(first), int(last or first) + 1))
    return list(dict.fromkeys(found))


def _distinct(devices: list[Device]) -> list[Device]:
    return list({d.uuid: d for d in devices}.values())


def _leaves(devices: Sequence[Device]) -> list[Device]:
    """The GPUs, with a GPU in MIG mode replaced by its slices: only those can be allocated."""
    split = {d.parent for d in devices}
    return [d for d in devices if d.uuid not in split]


def _by_uuid(token: str, devices: Sequence[Device]) -> Device:
    if reading.is_count(token):
        index = int(token)
        return next((d for d in _leaves(devices) if d.index == index), None) or _missing("index", index)
    # CUDA takes any prefix that is unique; upper and lower case both occur.
    found = [d for d in devices if d.uuid.lower().startswith(token.lower())]
    exact = [d for d in found if d.uuid.lower() == token.lower()]
    if len(exact or found) == 1:
        return (exact or found)[0]
    why = "NOT_FOUND: NVML does not list it" if not found else f"NOT_FOUND: {len(found)} devices begin so"
    return Device(uuid=token, reason=why)


def _by_number(numbers: list[int], variable: str, gpus: list[Device]) -> Allocation:
    by_minor: dict[int | None, Device] = {d.minor: d for d in gpus if d.minor is not None}
    if len(by_minor) == len(gpus):
        return _choose(numbers, by_minor, gpus, "minor", variable)
    return _choose(numbers, {d.index: d for d in gpus}, gpus, "index", variable)


def _choose(
    numbers: list[int], known: Mapping[int | None, Device], gpus: list[Device], what: str, variable: str
) -> Allocation:
    if not all(n in known for n in numbers) and len(numbers) == len(gpus):
        # A cgroup hides the others and counts anew; or the numbers are the batch host's, handed on by srun.
        return Allocation(gpus, f"all that NVML lists, which is as many as {variable} names")
    return Allocation([known.get(n) or _missing(what, n) for n in numbers], f"{variable}, by {what}")


def _missing(what: str, number: int) -> Device:
    return Device(uuid=f"missing-{what}-{number}", reason=f"NOT_FOUND: NVML lists no device with {what} {number}")


class HostShare(NamedTuple):
    """Processors and bytes of memory that the job has on this node; None where nothing limits or tells them."""

    cpus: int | None
    memory_bytes: int | None


def allocated(environ: Mapping[str, str], root: Path = Path("/")) -> HostShare:
    """What Slurm says, else what this process is limited to. ``root`` holds ``proc`` and ``sys``."""
    cpus = _count(environ, settings.SLURM_CPUS_ON_NODE) or len(os.sched_getaffinity(0))
    return HostShare(cpus, _slurm_memory(environ) or _cgroup_memory(root))


def _slurm_memory(environ: Mapping[str, str]) -> int | None:
    """Bytes on this node; None where Slurm does not say, or says 0 for all that there is."""
    of_node = _count(environ, settings.SLURM_MEM_PER_NODE)
    per_cpu, cpus = _count(environ, settings.SLURM_MEM_PER_CPU), _count(environ, settings.SLURM_CPUS_ON_NODE)
    per_gpu, gpus = _count(environ, settings.SLURM_MEM_PER_GPU), _count(environ, settings.SLURM_GPUS_ON_NODE)
    mib = of_node or per_cpu * cpus or per_gpu * gpus
    return mib << 20 or None


def _count(environ: Mapping[str, str], name: str) -> int:
    """0 where it is not set, or is no number."""
    value = environ.get(name, "")
    return int(value) if reading.is_count(value) else 0


def _cgroup_memory(root: Path) -> int | None:
    """The tightest limit of this process's cgroups and those above them, in bytes."""
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
        here = base / path.lstrip("/")
        while here != base.parent:
            limits.append(_limit(here / file))
            here = here.parent
    told = [n for n in limits if n is not None]
    return min(told, default=None)


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    # "max" in version 2; in version 1 no limit is the highest number of pages.
    return int(text) if reading.is_count(text) and int(text) < 1 << 60 else None

"""Ranks of a program that was started without clustertrain, found by the environment of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from clustertrain import reading, settings
from clustertrain.telemetry.readers.nvml import Device

# Steps of the batch script, of `salloc`'s shell and of the container that holds the job (slurm.h).
_NO_RANKS = frozenset({"", "4294967291", "4294967290", "4294967292", "4294967293"})


class _Source(NamedTuple):
    """The variables with which a launcher numbers its ranks."""

    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    group: tuple[str, ...]
    """Variables that are the same in all ranks of one program."""


# In the order in which they count: srun may start one torchrun on each node, whose variables the ranks inherit.
_SOURCES = (
    _Source("RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    _Source(
        "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_MCA_ess_base_jobid",)
    ),
    _Source("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("PMI_ID",)),
    _Source(
        settings.SLURM_PROCID, (settings.SLURM_STEP_NUM_TASKS, "SLURM_NTASKS"), settings.SLURM_LOCALID,
        ("SLURM_STEP_ID",),
    ),
)  # fmt: skip
_SLURM = _SOURCES[-1]
JOB_ID, NODE = settings.SLURM_JOB_ID, settings.SLURMD_NODENAME
NAMES = frozenset(
    {JOB_ID, NODE, "SLURM_STEP_ID", settings.CUDA_VISIBLE_DEVICES}
    | {name for s in _SOURCES for name in (s.rank, *s.world_size, s.local_rank, *s.group)}
)
"""The variables that are read; no other one is kept, since an environment holds secrets."""


class JobProcess(NamedTuple):
    """A process of the job on this node."""

    pid: int
    parent: int
    environ: Mapping[str, str]
    """Its variables among :data:`NAMES`, as it was started with them."""


class FoundRank(NamedTuple):
    """A rank on this node."""

    rank: int
    world_size: int
    local_rank: int | None
    pid: int
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES of the process."""


def parse_environ(data: bytes) -> dict[str, str]:
    """Return the variables among :data:`NAMES` in the contents of ``/proc/PID/environ``."""
    found = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and (key := name.decode(errors="replace")) in NAMES:
            found[key] = value.decode(errors="replace")
    return found


def find_ranks(processes: Sequence[JobProcess]) -> list[FoundRank]:
    """Return the ranks, ordered by number.

    The processes below a rank (data workers, compilers) inherit its variables, so the topmost process counts. If the
    job runs several programs with ranks on the node, the one with the most ranks counts, and of equal ones the newest.
    """
    for source in _SOURCES:
        groups: dict[tuple[str, ...], dict[int, FoundRank]] = {}
        by_pid = {p.pid: _identify(p, source) for p in processes}
        for process in sorted(processes, key=lambda p: p.pid):
            identity = by_pid[process.pid]
            if identity is None or by_pid.get(process.parent) == identity:
                continue
            group, rank, world_size = identity
            found = FoundRank(
                rank,
                world_size,
                _parse_number(process.environ.get(source.local_rank)),
                process.pid,
                process.environ.get(settings.CUDA_VISIBLE_DEVICES),
            )
            groups.setdefault(group, {}).setdefault(rank, found)
        if groups:
            largest = max(groups.values(), key=lambda ranks: (len(ranks), max(r.pid for r in ranks.values())))
            return sorted(largest.values())
    return []


def _identify(process: JobProcess, source: _Source) -> tuple[tuple[str, ...], int, int] | None:
    """Return group, rank and world size of a process; None if the source does not number it."""
    environ = process.environ
    if source is _SLURM and environ.get("SLURM_STEP_ID", "") in _NO_RANKS:
        return None
    rank = _parse_number(environ.get(source.rank))
    sizes = (_parse_number(environ.get(name)) for name in source.world_size)
    world_size = next((size for size in sizes if size is not None), None)
    if rank is None or world_size is None or rank >= world_size:
        return None
    return (str(world_size), *(environ.get(name, "") for name in source.group)), rank, world_size


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and len(text) < 10 and reading.is_unsigned_int(text) else None


def assign_ranks(ranks: Sequence[FoundRank], devices: Sequence[Device]) -> dict[str, list[int]]:
    """Return the ranks that use each of the allocated ``devices``, by UUID.

    A rank with one visible device uses it; the same number in all ranks means that each sees its own GPU as number 0.
    Otherwise local rank i uses the i-th allocated device, as in nearly all programs.
    """
    single = {r.rank: v for r in ranks if (v := (r.visible_devices or "").strip()) and "," not in v}
    is_distinct = len(single) == len(ranks) == len(set(single.values()))
    by_name = _index_devices(list(single.values()), devices) if is_distinct else {}
    found: dict[str, list[int]] = {}
    for position, rank in enumerate(ranks):
        device = by_name.get(single.get(rank.rank, ""))
        if device is None:
            index = position if rank.local_rank is None else rank.local_rank
            device = devices[index] if index < len(devices) else None
        if device is not None:
            found.setdefault(device.uuid, []).append(rank.rank)
    return found


def _index_devices(tokens: Sequence[str], devices: Sequence[Device]) -> dict[str, Device]:
    """Return the device of each token: UUIDs, numbers on the node, or positions among the allocated devices."""
    by_number = {str(d.index if d.minor is None else d.minor): d for d in devices}
    if all(token in by_number for token in tokens):
        return by_number
    by_position = {str(i): d for i, d in enumerate(devices)}
    if all(token in by_position for token in tokens):
        return by_position
    matches = {token: [d for d in devices if d.uuid.lower().startswith(token.lower())] for token in tokens}
    return {token: found[0] for token, found in matches.items() if len(found) == 1}

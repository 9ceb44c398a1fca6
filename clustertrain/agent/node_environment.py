"""What a node's agent finds out about its node when the job starts, and what it sets for the ranks because of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from clustertrain import settings
from clustertrain.config.node_facts import Gpu, NodeFacts
from clustertrain.plan.env import cpu_affinity, interfaces, nccl
from clustertrain.plan.env.nccl import Setting
from clustertrain.sysinfo.node import read
from clustertrain.telemetry.readers.nvml import NvmlError
from clustertrain.telemetry.readers.topology import read_gpus


class Job(NamedTuple):
    """The part of a job that a node's settings depend on."""

    device: str
    ranks: int  # on this node
    several_nodes: bool
    towards: str  # the interface that leads to the other nodes, empty where it cannot be told
    dumps: Path  # the Flight Recorder's files, without the rank's number


class Surroundings(msgspec.Struct, frozen=True):
    """``settings`` by name, none of which the environment had; ``notes``: what was not done, was not read, is wrong."""

    settings: dict[str, Setting]
    notes: tuple[str, ...] = ()

    def environ(self) -> dict[str, str]:
        return {name: setting.value for name, setting in self.settings.items()}


def look(job: Job, environ: Mapping[str, str], root: Path = Path("/")) -> Surroundings:
    """Never raises: a job whose node cannot be read runs with the defaults, as it would have before."""
    try:
        gpus, notes = _gpus(job, environ)
        return _decide(job, read(root, gpus=gpus, environ=environ), environ, os.sched_getaffinity(0), notes)
    except Exception as e:  # drivers and kernels have more ways to answer than this was written for
        where = traceback.extract_tb(e.__traceback__)[-1]
        return Surroundings({}, (f"the node was not read: {type(e).__name__}: {e} ({where.name})",))


def _gpus(job: Job, environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    if job.device != "cuda":
        return (), ()
    try:
        return read_gpus(environ), ()
    except NvmlError as e:
        return (), (f"no GPUs read: {e.reason}",)


def _decide(
    job: Job, facts: NodeFacts, environ: Mapping[str, str], allowed: Collection[int], notes: tuple[str, ...]
) -> Surroundings:
    found = nccl.of_node(
        job.device,
        facts,
        environ.keys(),
        towards=job.towards,
        several_nodes=job.several_nodes,
        dumps=str(job.dumps),
    )
    said = [*notes, *facts.unread]
    if job.several_nodes:
        said += interfaces.notes(facts)
    if job.device == "cuda" and not any(name in environ for name in settings.THREAD_BINDING):
        binding = cpu_affinity.near_gpus(facts, job.ranks, allowed)
        if binding.cpus:
            value = ";".join(",".join(map(str, cpus)) for cpus in binding.cpus)
            found[settings.RANK_CPUS] = Setting(value, binding.reason)
        else:
            said.append(f"ranks not bound to processors: {binding.reason}")
    return Surroundings(found, tuple(said))

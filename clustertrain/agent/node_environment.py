"""Environment of the ranks that depends on the hardware of their node, found when the job starts."""

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
from clustertrain.plan.env.nccl import EnvSetting
from clustertrain.sysinfo.node import read_node
from clustertrain.telemetry.readers.nvml import NvmlError
from clustertrain.telemetry.readers.topology import read_gpus


class NodeJob(NamedTuple):
    """The part of a job that a node's settings depend on."""

    device: str
    ranks: int
    """Ranks on this node."""
    is_multi_node: bool
    peer_interface: str
    """Network interface to the other nodes; empty if unknown."""
    flight_record_path: Path
    """Path of the Flight Recorder's files without the rank."""


class NodeEnvironment(msgspec.Struct, frozen=True):
    """Environment variables to add, by name, and notes on problems of the node and on checks that failed."""

    settings: dict[str, EnvSetting]
    notes: tuple[str, ...] = ()

    def environ(self) -> dict[str, str]:
        return {name: setting.value for name, setting in self.settings.items()}


def inspect_node(job: NodeJob, environ: Mapping[str, str], root: Path = Path("/")) -> NodeEnvironment:
    """Return the environment for this node. Never raises: if the node cannot be read, the defaults apply."""
    try:
        gpus, notes = _read_gpus(job, environ)
        return _choose_settings(
            job, read_node(root, gpus=gpus, environ=environ), environ, os.sched_getaffinity(0), notes
        )
    except Exception as e:  # drivers and kernels may answer in unexpected ways
        frame = traceback.extract_tb(e.__traceback__)[-1]
        return NodeEnvironment({}, (f"the node was not read: {type(e).__name__}: {e} ({frame.name})",))


def _read_gpus(job: NodeJob, environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    if job.device != "cuda":
        return (), ()
    try:
        return read_gpus(environ), ()
    except NvmlError as e:
        return (), (f"no GPUs read: {e.reason}",)


def _choose_settings(
    job: NodeJob, facts: NodeFacts, environ: Mapping[str, str], allowed: Collection[int], notes: tuple[str, ...]
) -> NodeEnvironment:
    node_settings = nccl.node_env(
        job.device,
        facts,
        environ.keys(),
        route_interface=job.peer_interface,
        several_nodes=job.is_multi_node,
        dump_prefix=str(job.flight_record_path),
    )
    all_notes = [*notes, *facts.read_errors]
    if job.is_multi_node:
        all_notes += interfaces.find_network_problems(facts)
    if job.device == "cuda" and not any(name in environ for name in settings.THREAD_BINDING):
        binding = cpu_affinity.bind_to_gpu_numa(facts, job.ranks, allowed)
        if binding.cpus:
            value = ";".join(",".join(map(str, cpus)) for cpus in binding.cpus)
            node_settings[settings.RANK_CPUS] = EnvSetting(value, binding.reason)
        else:
            all_notes.append(f"ranks not bound to CPUs: {binding.reason}")
    return NodeEnvironment(node_settings, tuple(all_notes))

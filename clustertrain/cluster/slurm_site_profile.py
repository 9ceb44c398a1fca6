"""Derive the keys of a cluster profile, with their sources, from a Slurm site. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clustertrain import reading
from clustertrain.cluster.slurm_site import Node, Partition, Site
from clustertrain.config import hardware
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import UsageError
from clustertrain.scheduler.slurm_parse import parse_field

_UNLIMITED = frozenset({"UNLIMITED", "NONE", "INFINITE"})


@dataclass(frozen=True)
class DetectedValue:
    """A detected value of a profile key."""

    value: Any
    source: str
    """Where the value comes from, as text."""


@dataclass
class DetectedProfile:
    """The detected part of a profile."""

    keys: dict[str, DetectedValue] = field(default_factory=dict)
    """Values by field name of ClusterProfile."""
    notes: list[str] = field(default_factory=list)
    """Messages to the user."""

    def add(self, key: str, value: Any, source: str) -> None:
        self.keys[key] = DetectedValue(value, source)


@dataclass(frozen=True)
class _GpuConfig:
    """The type and number of GPUs in a node."""

    type: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.type or 'GPU'}"


def detect_profile(site: Site, requested: str = "", source: str = "the requested one") -> DetectedProfile:
    """Derive a profile from one partition: ``requested`` (a name from ``source``), otherwise :func:`choose_partition`.

    Raises:
        UsageError: the partition does not exist, or no partition is up.
    """
    partition, source = (get_partition(site, requested), source) if requested else choose_partition(site)
    detected = DetectedProfile()
    detected.add("partition", partition.name, source)
    nodes = site.nodes_in_partition(partition.name)
    gpu_config = _add_gpus(detected, partition, nodes)
    if gpu_config is not None:
        _add_gpus_flag(detected, site)
        _add_cpus(detected, site, partition, [n for n in nodes if gpu_config in _gpu_configs(n)], gpu_config.count)
    _add_preemption(detected, site, partition)
    _note_limits(detected, site, partition, nodes)
    return detected


def get_partition(site: Site, name: str) -> Partition:
    """Return the partition called ``name``; raise UsageError if there is none."""
    by_name = {p.name: p for p in site.partitions}
    if name not in by_name:
        raise UsageError(f"Slurm has no partition {name!r}", fix=did_you_mean(name, list(by_name)))
    return by_name[name]


def choose_partition(site: Site) -> tuple[Partition, str]:
    """Return the default partition if its nodes have GPUs, otherwise the one with the most GPUs, and the reason.

    Raises:
        UsageError: no partition is up.
    """
    candidates = [p for p in site.partitions if p.is_open]
    if not candidates:
        raise UsageError("Slurm reports no partition that is up", fix="name one with --partition")
    gpus = {p.name: sum(g.count for n in site.nodes_in_partition(p.name) for g in n.gpus) for p in candidates}
    default = next((p for p in candidates if p.is_default), None)
    if default is not None and (gpus[default.name] or not any(gpus.values())):
        return default, "the default partition"
    largest = max(candidates, key=lambda p: gpus[p.name])
    return largest, (
        f"has the most GPUs, {gpus[largest.name]}" if gpus[largest.name] else "the first partition; there is no default"
    )


def _gpu_configs(node: Node) -> set[_GpuConfig]:
    return {_GpuConfig(g.type, g.count) for g in node.gpus}


def _add_gpus(detected: DetectedProfile, partition: Partition, nodes: Sequence[Node]) -> _GpuConfig | None:
    """Add the GPUs that make up most of the partition; mention others in a note."""
    counts = Counter(gpu_config for node in nodes for gpu_config in _gpu_configs(node))
    if not counts:
        detected.add("device", "cpu", f"no node of partition {partition.name} has GPUs")
        return None
    gpu_config = max(counts, key=lambda k: k.count * counts[k])
    source = f"Gres of {counts[gpu_config]} of {len(nodes)} nodes"
    detected.add("device", "cuda", source)
    detected.add("gpus_per_node", gpu_config.count, source)
    other_configs = ", ".join(f"{n} nodes with {k}" for k, n in counts.items() if k != gpu_config)
    if other_configs:
        detected.notes.append(f"partition {partition.name} also has {other_configs}: choose with submit --gpu-type")
    if not gpu_config.type:
        detected.notes.append(
            "Slurm has no type for its GPUs, so the plan does not know their memory until `cluster detect` runs in an "
            "allocation"
        )
        return gpu_config
    gpu = hardware.find_gpu_type(gpu_config.type)
    description = f"{gpu.name} with {gpu.memory_gib:g} GiB" if gpu else "not in the GPU catalog"
    detected.add("gpu_type", gpu_config.type, f"{source}; {description}")
    if gpu is None:
        detected.notes.append(
            f"GPU type {gpu_config.type!r} is site-specific and not in the GPU catalog, so the plan does not know its"
            " memory"
        )
    return gpu_config


def _add_gpus_flag(detected: DetectedProfile, site: Site) -> None:
    select = site.config.get("SelectType", "")
    # slurm.schedmd.com/gres.html: only cons_tres supports the --gpu* options; other plugins reject jobs that use them.
    flag = "gpus-per-node" if select == "select/cons_tres" else "gres"
    detected.add("gpus_flag", flag, f"SelectType={select or 'not reported'}")
    types = [t.strip() for t in site.config.get("GresTypes", "").split(",")]
    if "gpu" not in types:
        detected.notes.append(f"GresTypes={','.join(types)} does not contain gpu: Slurm may not allocate the GPUs")


def _add_cpus(detected: DetectedProfile, site: Site, partition: Partition, nodes: Sequence[Node], gpus: int) -> None:
    """Add the CPUs per GPU, unless the site sets a default."""
    for fields in (partition.fields, site.config):
        if "DefCpuPerGPU" in fields.get("JobDefaults", ""):
            detected.notes.append(f"cpus_per_gpu is left to the site: JobDefaults={fields['JobDefaults']}")
            return
    cpus, source = min(n.cpus for n in nodes), "CPUEfctv"
    max_cpus = partition.fields.get("MaxCPUsPerNode", "")
    if reading.is_unsigned_int(max_cpus) and int(max_cpus) < cpus:
        cpus, source = int(max_cpus), "MaxCPUsPerNode"
    if cpus >= gpus:
        detected.add("cpus_per_gpu", cpus // gpus, f"{source}={cpus} for {gpus} GPUs")


def _add_preemption(detected: DetectedProfile, site: Site, partition: Partition) -> None:
    preempt_type = site.config.get("PreemptType", "")
    if preempt_type == "preempt/qos":
        detected.notes.append(
            "preemption and its grace time depend on the QOS here: look up `sacctmgr show qos format=name,gracetime` "
            "and set grace_s"
        )
        return
    modes = partition.fields.get("PreemptMode", "OFF")
    if preempt_type != "preempt/partition_prio" or modes == "OFF":
        detected.notes.append(f"jobs in partition {partition.name} are not preempted (PreemptMode={modes})")
        return
    grace = partition.fields.get("GraceTime", "")
    detected.notes.append(
        f"jobs in partition {partition.name} may be preempted (PreemptMode={modes}, GraceTime={grace})"
    )
    if reading.is_unsigned_int(grace) and int(grace):
        detected.add("grace_s", float(grace), f"GraceTime of partition {partition.name}")


def _note_limits(detected: DetectedProfile, site: Site, partition: Partition, nodes: Sequence[Node]) -> None:
    """Add notes on time and memory limits, which are the user's choice and not part of a profile."""
    fields = partition.fields
    max_time = parse_field(fields.get("MaxTime", ""))
    default = parse_field(fields.get("DefaultTime", ""))
    limit_text = "no time limit" if not max_time or max_time in _UNLIMITED else f"at most {max_time}"
    default_text = f"; without --time a job gets {default}" if default and default not in _UNLIMITED else ""
    detected.notes.append(f"partition {partition.name}: {limit_text}{default_text}")
    memory = min((n.memory_mib for n in nodes), default=0)
    if memory:
        default = _default_memory(fields, site.config)
        default_text = (
            f"without --mem a job gets {default} (MiB)" if default else "Slurm has no default, so pass --mem to jobs"
        )
        detected.notes.append(f"a node has {memory / 1024:.0f} GiB of memory; {default_text}")


def _default_memory(*sources: Mapping[str, str]) -> str:
    """Return Slurm's setting of the default memory from the first source that has one, otherwise an empty string."""
    for fields in sources:
        for item in fields.get("JobDefaults", "").split(","):
            if item.startswith("DefMemPerGPU="):
                return item
        for name in ("DefMemPerCPU", "DefMemPerNode"):
            if reading.is_unsigned_int(fields.get(name, "")) and int(fields[name]):
                return f"{name}={fields[name]}"
    return ""

"""Site -> the keys of a cluster profile, each with where it comes from. Pure."""

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
    """A value of a profile's key, and in words where it comes from."""

    value: Any
    source: str


@dataclass
class DetectedProfile:
    """``keys`` by their names in ClusterProfile; ``notes`` are sentences for the reader."""

    keys: dict[str, DetectedValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, value: Any, source: str) -> None:
        self.keys[key] = DetectedValue(value, source)


@dataclass(frozen=True)
class _GpuConfig:
    """Nodes that have the same GPUs."""

    type: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.type or 'GPU'}"


def detect_profile(site: Site, requested: str = "", source: str = "the one asked for") -> DetectedProfile:
    """What a profile can say of one partition: ``requested``, for the reason ``source``, else
    :func:`choose_partition`'s.

    Raises:
        UsageError: there is no such partition, or none at all.
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
    """Raises UsageError where there is no such partition."""
    by_name = {p.name: p for p in site.partitions}
    if name not in by_name:
        raise UsageError(f"Slurm knows no partition {name!r}", fix=did_you_mean(name, list(by_name)))
    return by_name[name]


def choose_partition(site: Site) -> tuple[Partition, str]:
    """The default partition where its nodes have GPUs, else the one with the most GPUs; and why.

    Raises:
        UsageError: there is none.
    """
    candidates = [p for p in site.partitions if p.is_open]
    if not candidates:
        raise UsageError("Slurm shows no partition that is up", fix="name one with --partition")
    gpus = {p.name: sum(g.count for n in site.nodes_in_partition(p.name) for g in n.gpus) for p in candidates}
    default = next((p for p in candidates if p.is_default), None)
    if default is not None and (gpus[default.name] or not any(gpus.values())):
        return default, "the default partition"
    largest = max(candidates, key=lambda p: gpus[p.name])
    return largest, (
        f"has the most GPUs, {gpus[largest.name]}" if gpus[largest.name] else "the first one; there is no default"
    )


def _gpu_configs(node: Node) -> set[_GpuConfig]:
    return {_GpuConfig(g.type, g.count) for g in node.gpus}


def _add_gpus(detected: DetectedProfile, partition: Partition, nodes: Sequence[Node]) -> _GpuConfig | None:
    """The GPUs that the partition has most of; others become a note."""
    counts = Counter(gpu_config for node in nodes for gpu_config in _gpu_configs(node))
    if not counts:
        detected.add("device", "cpu", f"no node of partition {partition.name} has GPUs")
        return None
    gpu_config = max(counts, key=lambda k: k.count * counts[k])
    source = f"Gres of {counts[gpu_config]} of {len(nodes)} nodes"
    detected.add("device", "cuda", source)
    detected.add("gpus_per_node", gpu_config.count, source)
    others = ", ".join(f"{n} nodes with {k}" for k, n in counts.items() if k != gpu_config)
    if others:
        detected.notes.append(f"partition {partition.name} also has {others}: submit --gpu-type chooses")
    if not gpu_config.type:
        detected.notes.append(
            "Slurm gives its GPUs no type, so the plan does not know their memory until `cluster detect` has measured "
            "in an allocation"
        )
        return gpu_config
    gpu = hardware.find_gpu_type(gpu_config.type)
    description = f"{gpu.name} with {gpu.memory_gib:g} GiB" if gpu else "not in the catalogue"
    detected.add("gpu_type", gpu_config.type, f"{source}; {description}")
    if gpu is None:
        detected.notes.append(
            f"GPU type {gpu_config.type!r} is the site's word and not in the catalogue: the plan does not know its"
            " memory"
        )
    return gpu_config


def _add_gpus_flag(detected: DetectedProfile, site: Site) -> None:
    select = site.config.get("SelectType", "")
    # slurm.schedmd.com/gres.html: the --gpu* options are cons_tres's alone, other plugins refuse jobs that use them.
    flag = "gpus-per-node" if select == "select/cons_tres" else "gres"
    detected.add("gpus_flag", flag, f"SelectType={select or 'not shown'}")
    types = [t.strip() for t in site.config.get("GresTypes", "").split(",")]
    if "gpu" not in types:
        detected.notes.append(f"GresTypes={','.join(types)} names no gpu: Slurm may refuse to allocate the GPUs")


def _add_cpus(detected: DetectedProfile, site: Site, partition: Partition, nodes: Sequence[Node], gpus: int) -> None:
    """A GPU's share of the processors, unless the site gives one by itself."""
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
            "preemption goes by QOS here, and so does its grace time: see `sacctmgr show qos format=name,gracetime` "
            "and write grace_s"
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
    """Time and memory are choices, not facts: they are told and not written."""
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
            f"without --mem a job gets {default} (MiB)" if default else "Slurm names no default, so give jobs --mem"
        )
        detected.notes.append(f"a node has {memory / 1024:.0f} GiB of memory; {default_text}")


def _default_memory(*sources: Mapping[str, str]) -> str:
    """In Slurm's words; the first place that has one counts. Empty where none has."""
    for fields in sources:
        for item in fields.get("JobDefaults", "").split(","):
            if item.startswith("DefMemPerGPU="):
                return item
        for name in ("DefMemPerCPU", "DefMemPerNode"):
            if reading.is_unsigned_int(fields.get(name, "")) and int(fields[name]):
                return f"{name}={fields[name]}"
    return ""

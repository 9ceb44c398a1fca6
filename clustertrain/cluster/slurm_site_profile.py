"""Site -> the keys of a cluster profile, each with where it comes from. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clustertrain import reading
from clustertrain.cluster.slurm_site import Node, Partition, Site
from clustertrain.config import hardware
from clustertrain.config.parsing import nearest
from clustertrain.errors import UsageError
from clustertrain.scheduler.slurm_parse import word

_UNLIMITED = frozenset({"UNLIMITED", "NONE", "INFINITE"})


@dataclass(frozen=True)
class Found:
    """A value of a profile's key, and in words where it comes from."""

    value: Any
    source: str


@dataclass
class Findings:
    """``keys`` by their names in ClusterProfile; ``notes`` are sentences for the reader."""

    keys: dict[str, Found] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, value: Any, source: str) -> None:
        self.keys[key] = Found(value, source)


@dataclass(frozen=True)
class _Kind:
    """Nodes that have the same GPUs."""

    type: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.type or 'GPU'}"


def of_site(site: Site, wanted: str = "", why: str = "the one asked for") -> Findings:
    """What a profile can say of one partition: ``wanted``, for the reason ``why``, else :func:`choose`'s.

    Raises:
        UsageError: there is no such partition, or none at all.
    """
    partition, why = (named(site, wanted), why) if wanted else choose(site)
    found = Findings()
    found.add("partition", partition.name, why)
    nodes = site.nodes_of(partition.name)
    kind = _gpus(found, partition, nodes)
    if kind is not None:
        _gpus_flag(found, site)
        _cpus(found, site, partition, [n for n in nodes if kind in _kinds(n)], kind.count)
    _preemption(found, site, partition)
    _limits(found, site, partition, nodes)
    return found


def named(site: Site, wanted: str) -> Partition:
    """Raises UsageError where there is no such partition."""
    by_name = {p.name: p for p in site.partitions}
    if wanted not in by_name:
        raise UsageError(f"Slurm knows no partition {wanted!r}", fix=nearest(wanted, list(by_name)))
    return by_name[wanted]


def choose(site: Site) -> tuple[Partition, str]:
    """The default partition where its nodes have GPUs, else the one with the most GPUs; and why.

    Raises:
        UsageError: there is none.
    """
    candidates = [p for p in site.partitions if p.open]
    if not candidates:
        raise UsageError("Slurm shows no partition that is up", fix="name one with --partition")
    gpus = {p.name: sum(g.count for n in site.nodes_of(p.name) for g in n.gpus) for p in candidates}
    default = next((p for p in candidates if p.default), None)
    if default is not None and (gpus[default.name] or not any(gpus.values())):
        return default, "the default partition"
    most = max(candidates, key=lambda p: gpus[p.name])
    return most, f"has the most GPUs, {gpus[most.name]}" if gpus[most.name] else "the first one; there is no default"


def _kinds(node: Node) -> set[_Kind]:
    return {_Kind(g.type, g.count) for g in node.gpus}


def _gpus(found: Findings, partition: Partition, nodes: Sequence[Node]) -> _Kind | None:
    """The GPUs that the partition has most of; others become a note."""
    counted = Counter(kind for node in nodes for kind in _kinds(node))
    if not counted:
        found.add("device", "cpu", f"no node of partition {partition.name} has GPUs")
        return None
    kind = max(counted, key=lambda k: k.count * counted[k])
    where = f"Gres of {counted[kind]} of {len(nodes)} nodes"
    found.add("device", "cuda", where)
    found.add("gpus_per_node", kind.count, where)
    others = ", ".join(f"{n} nodes with {k}" for k, n in counted.items() if k != kind)
    if others:
        found.notes.append(f"partition {partition.name} also has {others}: submit --gpu-type chooses")
    if not kind.type:
        found.notes.append(
            "Slurm gives its GPUs no type, so the plan does not know their memory until `cluster detect` has measured "
            "in an allocation"
        )
        return kind
    gpu = hardware.find(kind.type)
    known = f"{gpu.name} with {gpu.memory_gib:g} GiB" if gpu else "not in the catalogue"
    found.add("gpu_type", kind.type, f"{where}; {known}")
    if gpu is None:
        found.notes.append(
            f"GPU type {kind.type!r} is the site's word and not in the catalogue: the plan does not know its memory"
        )
    return kind


def _gpus_flag(found: Findings, site: Site) -> None:
    select = site.config.get("SelectType", "")
    # slurm.schedmd.com/gres.html: the --gpu* options are cons_tres's alone, other plugins refuse jobs that use them.
    flag = "gpus-per-node" if select == "select/cons_tres" else "gres"
    found.add("gpus_flag", flag, f"SelectType={select or 'not shown'}")
    types = [t.strip() for t in site.config.get("GresTypes", "").split(",")]
    if "gpu" not in types:
        found.notes.append(f"GresTypes={','.join(types)} names no gpu: Slurm may refuse to allocate the GPUs")


def _cpus(found: Findings, site: Site, partition: Partition, nodes: Sequence[Node], gpus: int) -> None:
    """A GPU's share of the processors, unless the site gives one by itself."""
    for where in (partition.fields, site.config):
        if "DefCpuPerGPU" in where.get("JobDefaults", ""):
            found.notes.append(f"cpus_per_gpu is left to the site: JobDefaults={where['JobDefaults']}")
            return
    cpus, source = min(n.cpus for n in nodes), "CPUEfctv"
    most = partition.fields.get("MaxCPUsPerNode", "")
    if reading.is_count(most) and int(most) < cpus:
        cpus, source = int(most), "MaxCPUsPerNode"
    if cpus >= gpus:
        found.add("cpus_per_gpu", cpus // gpus, f"{source}={cpus} for {gpus} GPUs")


def _preemption(found: Findings, site: Site, partition: Partition) -> None:
    kind = site.config.get("PreemptType", "")
    if kind == "preempt/qos":
        found.notes.append(
            "preemption goes by QOS here, and so does its grace time: see `sacctmgr show qos format=name,gracetime` "
            "and write grace_s"
        )
        return
    modes = partition.fields.get("PreemptMode", "OFF")
    if kind != "preempt/partition_prio" or modes == "OFF":
        found.notes.append(f"jobs in partition {partition.name} are not preempted (PreemptMode={modes})")
        return
    grace = partition.fields.get("GraceTime", "")
    found.notes.append(f"jobs in partition {partition.name} may be preempted (PreemptMode={modes}, GraceTime={grace})")
    if reading.is_count(grace) and int(grace):
        found.add("grace_s", float(grace), f"GraceTime of partition {partition.name}")


def _limits(found: Findings, site: Site, partition: Partition, nodes: Sequence[Node]) -> None:
    """Time and memory are choices, not facts: they are told and not written."""
    fields = partition.fields
    most = word(fields.get("MaxTime", ""))
    usual = word(fields.get("DefaultTime", ""))
    longest = "no time limit" if not most or most in _UNLIMITED else f"at most {most}"
    without = f"; without --time a job gets {usual}" if usual and usual not in _UNLIMITED else ""
    found.notes.append(f"partition {partition.name}: {longest}{without}")
    memory = min((n.memory_mib for n in nodes), default=0)
    if memory:
        usual = _default_memory(fields, site.config)
        without = f"without --mem a job gets {usual} (MiB)" if usual else "Slurm names no default, so give jobs --mem"
        found.notes.append(f"a node has {memory / 1024:.0f} GiB of memory; {without}")


def _default_memory(*places: Mapping[str, str]) -> str:
    """In Slurm's words; the first place that has one counts. Empty where none has."""
    for where in places:
        for item in where.get("JobDefaults", "").split(","):
            if item.startswith("DefMemPerGPU="):
                return item
        for name in ("DefMemPerCPU", "DefMemPerNode"):
            if reading.is_count(where.get(name, "")) and int(where[name]):
                return f"{name}={where[name]}"
    return ""

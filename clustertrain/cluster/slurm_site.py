"""Read a Slurm site with ``scontrol show config``, ``partition`` and ``node``.

The text output is parsed, because scontrol of Slurm 22.05 has no ``--json``. The fields used here are the same from
22.05 to 24.11.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from clustertrain import proc, reading
from clustertrain.errors import CommandFailed
from clustertrain.scheduler.slurm import COMMAND_TIMEOUT_S, client_environ
from clustertrain.scheduler.slurm_parse import format_error, parse_field


@dataclass(frozen=True)
class Gres:
    """A generic resource of a node."""

    name: str
    type: str
    """The site's name for the type, or an empty string."""
    count: int


@dataclass(frozen=True)
class Node:
    """A compute node."""

    name: str
    partitions: tuple[str, ...]
    cpus: int
    """CPUs available to jobs, without cores reserved for the system."""
    memory_mib: int
    gres: tuple[Gres, ...]

    @property
    def gpus(self) -> tuple[Gres, ...]:
        return tuple(g for g in self.gres if g.name == "gpu")


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster."""

    name: str
    fields: Mapping[str, str]
    """Fields as printed by scontrol."""

    @property
    def is_default(self) -> bool:
        return self.fields.get("Default") == "YES"

    @property
    def is_open(self) -> bool:
        """Whether an ordinary user's job may start in the partition."""
        return self.fields.get("State") == "UP" and self.fields.get("RootOnly") != "YES"


@dataclass(frozen=True)
class Site:
    """A Slurm cluster: its configuration, partitions and nodes."""

    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]

    @property
    def cluster_name(self) -> str:
        return parse_field(self.config.get("ClusterName", ""))

    def nodes_in_partition(self, partition: str) -> list[Node]:
        return [node for node in self.nodes if partition in node.partitions]


def query_site() -> Site | None:
    """Query the Slurm site of this machine; return None if Slurm's commands are not installed.

    Raises:
        CommandFailed: Slurm does not answer.
    """
    if shutil.which("scontrol") is None:
        return None
    config, partitions, nodes = (_scontrol_show(entity) for entity in ("config", "partition", "node"))
    return Site(config=parse_config(config), partitions=parse_partitions(partitions), nodes=parse_nodes(nodes))


def _scontrol_show(entity: str) -> str:
    argv = ["scontrol", "--oneliner", "show", entity]
    result = proc.run(argv, env=client_environ(os.environ), check=False, timeout_s=COMMAND_TIMEOUT_S)
    if result.returncode:
        raise CommandFailed(
            f"Slurm is installed, but `scontrol show {entity}` failed: {format_error(result.stderr or result.stdout)}",
            fix="check that `scontrol ping` answers, or use --local for this machine without Slurm",
        )
    return result.stdout


def parse_config(text: str) -> dict[str, str]:
    """Parse ``Name   = value`` lines; the first value of a name wins, because cgroup.conf follows after slurm.conf."""
    config: dict[str, str] = {}
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign:
            config.setdefault(name.strip(), value.strip())
    return config


def parse_partitions(text: str) -> tuple[Partition, ...]:
    return tuple(Partition(name=r["PartitionName"], fields=r) for r in _parse_records(text, "PartitionName"))


def parse_nodes(text: str) -> tuple[Node, ...]:
    return tuple(
        Node(
            name=r["NodeName"],
            partitions=tuple(p for p in r.get("Partitions", "").split(",") if p),
            cpus=_parse_count(r.get("CPUEfctv") or r.get("CPUTot", "")),
            memory_mib=_parse_count(r.get("RealMemory", "")),
            gres=parse_gres(r.get("Gres", "")),
        )
        for r in _parse_records(text, "NodeName")
    )


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Parse ``gpu:a100:4(S:0,2),shard:8`` to (gpu, a100, 4), (shard, "", 8); skip items without a plain count."""
    gres = []
    # Parentheses hold sockets and indices, which may contain commas.
    for item in re.sub(r"\([^)]*\)", "", parse_field(text)).split(","):
        name, *middle, count = item.split(":") if ":" in item else (item, "")
        if reading.is_unsigned_int(count):
            gres.append(Gres(name=name, type=middle[0] if middle else "", count=int(count)))
    return tuple(gres)


def _parse_records(text: str, first_key: str) -> list[dict[str, str]]:
    """Parse records that span one or several lines.

    Values may contain blanks (``OS=Linux 6.1 #1 SMP``, partition names). The first value of a name wins, because a
    Reason is free text.
    """
    records = []
    for block in re.split(rf"^(?={first_key}=)", text, flags=re.MULTILINE):
        fields: dict[str, str] = {}
        for name, value in re.findall(r"(\w+)=(.*?)(?=\s+[A-Z]\w*=|\s*\Z)", block, flags=re.DOTALL):
            fields.setdefault(name, value)
        if first_key in fields:
            records.append(fields)
    return records


def _parse_count(text: str) -> int:
    return int(text) if reading.is_unsigned_int(text) else 0

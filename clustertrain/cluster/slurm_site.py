"""What Slurm says of a site: ``scontrol show config``, ``partition`` and ``node`` -> Site.

The text is read, since scontrol of Slurm 22.05 has no ``--json``. Fields come and go between versions; those used here
are the same from 22.05 to 24.11.
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
    """``type`` is the site's word, empty where it gives none."""

    name: str
    type: str
    count: int


@dataclass(frozen=True)
class Node:
    """``cpus`` are those that jobs may have: without the cores that a site keeps for itself."""

    name: str
    partitions: tuple[str, ...]
    cpus: int
    memory_mib: int
    gres: tuple[Gres, ...]

    @property
    def gpus(self) -> tuple[Gres, ...]:
        return tuple(g for g in self.gres if g.name == "gpu")


@dataclass(frozen=True)
class Partition:
    """``fields`` are Slurm's own, as it prints them."""

    name: str
    fields: Mapping[str, str]

    @property
    def is_default(self) -> bool:
        return self.fields.get("Default") == "YES"

    @property
    def is_open(self) -> bool:
        """Whether an ordinary user's job may start there."""
        return self.fields.get("State") == "UP" and self.fields.get("RootOnly") != "YES"


@dataclass(frozen=True)
class Site:
    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]

    @property
    def cluster_name(self) -> str:
        return parse_field(self.config.get("ClusterName", ""))

    def nodes_in_partition(self, partition: str) -> list[Node]:
        return [node for node in self.nodes if partition in node.partitions]


def query_site() -> Site | None:
    """The site that Slurm's commands on this machine belong to; None where there are no such commands.

    Raises:
        CommandFailed: Slurm gave no answer.
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
            f"Slurm's commands are here, but `scontrol show {entity}` failed:"
            f" {format_error(result.stderr or result.stdout)}",
            fix="see whether `scontrol ping` answers; --local is for this machine alone, without Slurm",
        )
    return result.stdout


def parse_config(text: str) -> dict[str, str]:
    """``Name   = value`` lines; the first of a name counts, cgroup.conf's follow further down."""
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
    """``gpu:a100:4(S:0,2),shard:8`` -> (gpu, a100, 4), (shard, "", 8). What has no plain count is left out."""
    gres = []
    # Sockets and indices stand in brackets, with commas of their own.
    for item in re.sub(r"\([^)]*\)", "", parse_field(text)).split(","):
        name, *middle, count = item.split(":") if ":" in item else (item, "")
        if reading.is_unsigned_int(count):
            gres.append(Gres(name=name, type=middle[0] if middle else "", count=int(count)))
    return tuple(gres)


def _parse_records(text: str, first_key: str) -> list[dict[str, str]]:
    """One mapping for each record, on one line or on several. Values may hold blanks (``OS=Linux 6.1 #1 SMP``,
    partition names); the first of a name counts, since a Reason is anybody's text."""
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

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
from clustertrain.scheduler.slurm import ANSWER_S, client_environ
from clustertrain.scheduler.slurm_parse import plain, word


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
    def default(self) -> bool:
        return self.fields.get("Default") == "YES"

    @property
    def open(self) -> bool:
        """Whether an ordinary user's job may start there."""
        return self.fields.get("State") == "UP" and self.fields.get("RootOnly") != "YES"


@dataclass(frozen=True)
class Site:
    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]

    @property
    def cluster_name(self) -> str:
        return word(self.config.get("ClusterName", ""))

    def nodes_of(self, partition: str) -> list[Node]:
        return [node for node in self.nodes if partition in node.partitions]


def ask() -> Site | None:
    """The site that Slurm's commands on this machine belong to; None where there are no such commands.

    Raises:
        CommandFailed: Slurm gave no answer.
    """
    if shutil.which("scontrol") is None:
        return None
    config, partitions, nodes = (_show(what) for what in ("config", "partition", "node"))
    return Site(config=read_config(config), partitions=read_partitions(partitions), nodes=read_nodes(nodes))


def _show(what: str) -> str:
    argv = ["scontrol", "--oneliner", "show", what]
    done = proc.run(argv, env=client_environ(os.environ), check=False, timeout_s=ANSWER_S)
    if done.returncode:
        raise CommandFailed(
            f"Slurm's commands are here, but `scontrol show {what}` failed: {plain(done.stderr or done.stdout)}",
            fix="see whether `scontrol ping` answers; --local is for this machine alone, without Slurm",
        )
    return done.stdout


def read_config(text: str) -> dict[str, str]:
    """``Name   = value`` lines; the first of a name counts, cgroup.conf's follow further down."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign:
            found.setdefault(name.strip(), value.strip())
    return found


def read_partitions(text: str) -> tuple[Partition, ...]:
    return tuple(Partition(name=r["PartitionName"], fields=r) for r in _records(text, "PartitionName"))


def read_nodes(text: str) -> tuple[Node, ...]:
    return tuple(
        Node(
            name=r["NodeName"],
            partitions=tuple(p for p in r.get("Partitions", "").split(",") if p),
            cpus=_number(r.get("CPUEfctv") or r.get("CPUTot", "")),
            memory_mib=_number(r.get("RealMemory", "")),
            gres=read_gres(r.get("Gres", "")),
        )
        for r in _records(text, "NodeName")
    )


def read_gres(text: str) -> tuple[Gres, ...]:
    """``gpu:a100:4(S:0,2),shard:8`` -> (gpu, a100, 4), (shard, "", 8). What has no plain count is left out."""
    found = []
    # Sockets and indices stand in brackets, with commas of their own.
    for item in re.sub(r"\([^)]*\)", "", word(text)).split(","):
        name, *middle, count = item.split(":") if ":" in item else (item, "")
        if reading.is_count(count):
            found.append(Gres(name=name, type=middle[0] if middle else "", count=int(count)))
    return tuple(found)


def _records(text: str, first: str) -> list[dict[str, str]]:
    """One mapping for each record, on one line or on several. Values may hold blanks (``OS=Linux 6.1 #1 SMP``,
    partition names); the first of a name counts, since a Reason is anybody's text."""
    records = []
    for block in re.split(rf"^(?={first}=)", text, flags=re.MULTILINE):
        fields: dict[str, str] = {}
        for name, value in re.findall(r"(\w+)=(.*?)(?=\s+[A-Z]\w*=|\s*\Z)", block, flags=re.DOTALL):
            fields.setdefault(name, value)
        if first in fields:
            records.append(fields)
    return records


def _number(text: str) -> int:
    return int(text) if reading.is_count(text) else 0

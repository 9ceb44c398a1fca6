"""Sockets per rank and latency of a session's control groups, against gloo groups of all ranks in the same processes.

The ranks are processes on this machine. The latency is that of one agreement whose result the rank waits for at once.
In training, an agreement has a whole step to complete. With more ranks than processors, it is mostly the time until
each rank is scheduled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import measure
from benchmarks.rank_team import Team, run_team
from clustertrain.checkpoint.core.control_group import GROUP_SIZE, ControlGroup
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.train.core.stop import StopAgreement

RANKS = (2, 8, 32, 64, 128)
GROUPS = 2  # of a session: stop and checkpoint
AGREEMENTS = 50
KINDS = ("tree", "full")


def main() -> int:
    result = measure.context(("clustertrain", "torch"))
    result["rows"] = []
    print(f"{'ranks':>5}  {'control groups: sockets':>32}  {'ms':>7}  {'full groups: sockets':>32}  {'ms':>7}")
    for ranks in RANKS:
        row = {"ranks": ranks, **run_team(ranks, 1, _measure)}
        result["rows"].append(row)
        columns = (f"{_describe(row[kind]['sockets']):>32}  {row[kind]['latency_ms']:7.2f}" for kind in KINDS)
        print(f"{ranks:5}  {'  '.join(columns)}", flush=True)
    print(f"written to {measure.write('sockets', result).relative_to(measure.ROOT)}")
    most = [row["tree"]["sockets"]["max"] for row in result["rows"]]
    return 0 if all(n <= _limit(ranks) for n, ranks in zip(most, RANKS, strict=True)) else 1


def _limit(ranks: int) -> int:
    """Return the most sockets that a rank may have: its peers at each level of the trees, and two that listen."""
    levels = 1
    while GROUP_SIZE**levels < ranks:
        levels += 1
    return GROUPS * ((GROUP_SIZE - 1) * levels + 1)


def _describe(sockets: dict[str, int]) -> str:
    return f"rank 0 {sockets['rank_0']}, median {sockets['median']}, max {sockets['max']}"


def _measure(team: Team) -> dict[str, Any]:
    opened = _count_sockets()
    trees = [team.new_control_group() for _ in range(GROUPS)]
    agreement = StopAgreement(lambda: False, trees[0])
    tree = {
        "sockets": _over_ranks(trees[1], _count_sockets() - opened),
        "latency_ms": _time(team, lambda: agreement.any_rank(False)),
    }
    opened = _count_sockets()
    groups = [team.new_group() for _ in range(GROUPS)]
    flag = torch.zeros(1, dtype=torch.uint8)
    full = {
        "sockets": _over_ranks(trees[1], _count_sockets() - opened),
        "latency_ms": _time(team, lambda: dist.all_reduce(flag, dist.ReduceOp.MAX, group=groups[0])),
    }
    for group in trees:
        group.close()
    return {"tree": tree, "full": full}


def _over_ranks(group: ControlGroup, sockets: int) -> dict[str, int]:
    """Return the number of rank 0, the median and the maximum of all ranks, on rank 0."""
    counts = Ranks(group).gather(sockets) or [0]
    return {"rank_0": counts[0], "median": int(statistics.median(counts)), "max": max(counts)}


def _count_sockets() -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own descriptor
            count += str(descriptor.readlink()).startswith("socket:")
    return count


def _time(team: Team, agree: Callable[[], object]) -> float:
    """Return the median milliseconds of ``agree`` on this rank."""
    agree()
    team.barrier()
    times = []
    for _ in range(AGREEMENTS):
        started = time.perf_counter()
        agree()
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e3, 3)

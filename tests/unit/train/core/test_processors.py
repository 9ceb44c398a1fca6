"""CPU affinity of a rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from clustertrain.train.main import set_cpu_affinity
set_cpu_affinity(sys.argv[1], int(sys.argv[2]))
print(",".join(map(str, sorted(os.sched_getaffinity(0)))))
"""


def pinned_cpus(cpus: str, local_rank: int) -> str:
    """Return the CPUs of a process after ``set_cpu_affinity``."""
    argv = [sys.executable, "-c", PROGRAM, cpus, str(local_rank)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.long
def test_each_local_rank_is_pinned_to_its_cpus() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    lists = f"{allowed[0]};{allowed[-1]}"
    assert (pinned_cpus(lists, 0), pinned_cpus(lists, 1)) == (str(allowed[0]), str(allowed[-1]))


@pytest.mark.parametrize("cpus", ["99999", "x", "", "0;1"])
def test_invalid_cpu_list_changes_nothing(cpus: str) -> None:
    assert pinned_cpus(cpus, 2) == ",".join(map(str, sorted(os.sched_getaffinity(0))))

"""A few rounds of ``make chaos-slurm``: faults in each part of the cluster, and simultaneous commands."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.harness.chaos_slurm.rounds import plan_of

pytestmark = pytest.mark.slurm
SEED, ROUNDS = "230054", 5


def test_rounds_cover_all_faults() -> None:
    """If this fails, the list of faults has changed: choose another seed."""
    drawn = {str(plan_of(SEED, n).fault.kind) for n in range(ROUNDS)}
    assert drawn >= {"kill slurmctld", "preempt", "cancel then two requeues", "kill rank", "kill batch"}


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(1200)
def test_runs_with_faults_equal_undisturbed_runs(cluster: Any) -> None:
    argv = [sys.executable, "-m", "tests.harness.chaos_slurm", "--seed", SEED, "--rounds", str(ROUNDS)]
    done = subprocess.run(argv, env=cluster.env, text=True, capture_output=True, timeout=1100, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"

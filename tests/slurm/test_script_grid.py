"""Scripts rendered for a grid of options, as sbatch of the real cluster reads them. Their shell part is tested in
tests/unit/submit/test_job_script_grid.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.script_grid import cases, options

pytestmark = pytest.mark.slurm
HOSTS = "NodeName=node[01-04]"


@pytest.fixture
def prepared_cluster(cluster: Any) -> Iterator[Any]:
    """The cluster with the features, reservation and licenses of the grid. It does not enforce accounts and QOS."""
    resource = ("resource", f"name={options.LICENSE}", f"server={options.LICENSE_SERVER}")
    try:
        cluster.run("scontrol", "update", HOSTS, f"AvailableFeatures={options.FEATURES}")
        # FLEX and far in the future: jobs may use the reservation now, and it blocks no other job.
        cluster.run("scontrol", "create", "reservation", f"ReservationName={options.RESERVATION}",
                    "StartTime=now+365days", "Duration=60", "Nodes=ALL", "Users=root", "Flags=FLEX")  # fmt: skip
        cluster.run("sacctmgr", "-i", "add", *resource, "count=8", "type=license", "cluster=testbed",
                    "percentallowed=100")  # fmt: skip
        cluster.wait_for(
            lambda: options.LICENSE in cluster.run("scontrol", "show", "licenses", check=False).stdout,
            30,
            "the licenses to reach slurmctld from slurmdbd",
        )
        yield cluster
    finally:
        cluster.run("sacctmgr", "-i", "delete", *resource, check=False)
        cluster.run("scontrol", "delete", "reservation", options.RESERVATION, check=False)
        cluster.run("scontrol", "update", HOSTS, "AvailableFeatures=", "ActiveFeatures=", check=False)


def test_sbatch_accepts_every_script(prepared_cluster: Any, tmp_path: Path) -> None:
    grid = cases.render(
        cases.make_cases(tmp_path), tmp_path, cases.submission_environment(tmp_path, prepared_cluster.env)
    )
    assert len(grid) >= 200
    for scripts in grid:
        folder = scripts.submitted.parent
        done = prepared_cluster.run("sbatch", "--test-only", "--verbose", f"--chdir={folder}", str(scripts.submitted))
        # "sbatch: account             : …" is how sbatch read the script's directives.
        parsed = dict(re.findall(r"^sbatch: (\S+) +: (.*)$", done.stderr, flags=re.MULTILINE))
        expected = scripts.case.reads
        assert {key: parsed.get(key) for key in expected} == expected, (scripts, done.stderr)
        assert re.search(r"^sbatch: Job \d+ to start at ", done.stderr, flags=re.MULTILINE), (scripts, done.stderr)

"""The testbed keeps its word: what the other tests of this folder build on.

Preemption by the high partition, and that a host which is killed or cut off goes down, is shown with the main job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm

NODES = ["node01", "node02", "node03", "node04"]

Submit = Callable[..., str]


@pytest.fixture
def healed(cluster: Cluster) -> Iterator[str]:
    """A host that the test may break."""
    yield "node03"
    cluster.heal_node("node03")


def test_both_partitions_have_four_idle_hosts(cluster: Cluster) -> None:
    cluster.wait_for(lambda: set(cluster.node_states().values()) == {"idle"}, 60, "four idle hosts")
    out = cluster.run("sinfo", "-h", "-o", "%R %T %D %N").stdout
    assert sorted(out.splitlines()) == ["high idle 4 node[01-04]", "low idle 4 node[01-04]"]


def test_step_sees_its_host_and_gpus(cluster: Cluster) -> None:
    script = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    out = cluster.run("srun", "-N4", "--ntasks-per-node=1", "--gpus-per-node=2", "bash", "-c", script).stdout
    assert sorted(out.splitlines()) == [f"{node} 0,1" for node in NODES]


def test_hosts_reach_each_other_by_name(cluster: Cluster, tmp_path: Path) -> None:
    """What gloo needs: each host's own name leads to its address, and the others connect to that."""
    script = (
        "import os, socket, time\n"
        "if os.environ['SLURM_PROCID'] == '0':\n"
        "    server = socket.create_server((socket.gethostname(), 0))\n"
        "    server.settimeout(60)\n"
        "    open('port.new', 'w').write(f'{socket.gethostname()} {server.getsockname()[1]}')\n"
        "    os.rename('port.new', 'port')\n"
        "    print('from', server.accept()[1][0])\n"
        "else:\n"
        "    deadline = time.monotonic() + 60\n"
        "    while not os.path.exists('port') and time.monotonic() < deadline:\n"
        "        time.sleep(0.05)\n"
        "    host, port = open('port').read().split()\n"
        "    print('to', socket.create_connection((host, int(port)), 60).getpeername()[0])\n"
    )
    out = cluster.run(
        "srun", "-w", "node02,node04", "-N2", "-n2", f"--chdir={tmp_path}", "python3", "-c", script
    ).stdout
    assert sorted(out.splitlines()) == ["from 10.77.0.14", "to 10.77.0.12"]


def test_host_back_before_slurm_noticed_has_lost_its_job(cluster: Cluster, submit: Submit, healed: str) -> None:
    """As after a reboot: slurmctld must not believe in processes that are gone."""
    job = submit("sleep 600", "-N1", "-w", healed, "--no-requeue")
    cluster.wait_for(lambda: cluster.job_states(job) == ["RUNNING"], 60, "the start of the job")
    cluster.kill_node(healed)
    cluster.heal_node(healed)
    cluster.wait_for(lambda: cluster.job_states(job) == ["NODE_FAIL"], 60, "NODE_FAIL in sacct")
    assert cluster.run("srun", "-w", healed, "hostname").stdout.strip() == healed

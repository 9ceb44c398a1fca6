"""The properties of the testbed on which the other tests of this folder rely.

The tests of the main job show two more: preemption by the high partition, and that a host goes down after it is killed
or disconnected.
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
def breakable_node(cluster: Cluster) -> Iterator[str]:
    """A host that the test may break. It is healed afterwards."""
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
    """gloo needs this: each host's name resolves to its address, and the other hosts connect to that address."""
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


def test_host_back_before_slurm_noticed_has_lost_its_job(cluster: Cluster, submit: Submit, breakable_node: str) -> None:
    """Like after a reboot: slurmctld must notice that the processes are gone."""
    job = submit("sleep 600", "-N1", "-w", breakable_node, "--no-requeue")
    cluster.wait_for(lambda: cluster.job_states(job) == ["RUNNING"], 60, "the start of the job")
    cluster.kill_node(breakable_node)
    cluster.heal_node(breakable_node)
    cluster.wait_for(lambda: cluster.job_states(job) == ["NODE_FAIL"], 60, "NODE_FAIL in sacct")
    assert cluster.run("srun", "-w", breakable_node, "hostname").stdout.strip() == breakable_node

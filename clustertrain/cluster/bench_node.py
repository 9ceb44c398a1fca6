"""``python -m clustertrain.cluster.bench_node``: the process on each node that runs one measurement.

It starts the ranks with torchrun, as the agent does for a run, and kills all of them before it exits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from types import FrameType

from clustertrain import proc, settings
from clustertrain.cluster.node_facts import read_local_node_facts
from clustertrain.plan.env import nccl
from clustertrain.scheduler.sockets import find_free_port, find_interface_to


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", default="", help="node names, separated by commas; empty: this machine")
    parser.add_argument("--ranks", type=int, required=True, help="ranks per node")
    parser.add_argument("--port", type=int, default=0, help="a free port on the first node; 0: find one here")
    parser.add_argument("what", choices=("all-reduce", "all-reduce-across"))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options = parser.parse_args()
    nodes = options.nodes.split(",") if options.nodes else []
    rank = int(os.environ.get(settings.SLURM_NODEID, "0")) if len(nodes) > 1 else 0
    master = nodes[0] if len(nodes) > 1 else "127.0.0.1"
    port = options.port or find_free_port()
    proc.become_subreaper()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    child = proc.start(
        [
            *proc.python_module_argv(sys.executable, "torch.distributed.run"),
            "--rdzv-backend=static", f"--master-addr={master}",
            f"--master-port={port}", f"--rdzv-id=measure-{port}",
            f"--nnodes={max(1, len(nodes))}", f"--node-rank={rank}", f"--nproc-per-node={options.ranks}",
            "--max-restarts=0", "--no-python",
            *proc.python_module_argv(sys.executable, "clustertrain.cluster.bench_ranks", options.what),
            "--device", options.device,
        ],
        env=_environment(nodes, rank, options.device),
    )  # fmt: skip
    try:
        return child.wait()
    finally:
        proc.kill_descendants()


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _environment(nodes: list[str], rank: int, device: str) -> dict[str, str]:
    """Return the environment with the settings of an agent on this node, so that runs get the measured rates."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it too, with a warning
    is_multi_node = len(nodes) > 1
    interface = _find_interface(nodes[1 if rank == 0 else 0] if is_multi_node else "127.0.0.1")
    if is_multi_node:
        # Treat the flight recorder's path as set, so that a measurement leaves no dumps.
        already_set = {*env, "TORCH_FR_DUMP_TEMP_FILE"}
        node_settings = nccl.node_env(
            device, read_local_node_facts(), already_set, route_interface=interface, several_nodes=True, dump_prefix=""
        )
        env |= {name: setting.value for name, setting in node_settings.items()}
    if "GLOO_SOCKET_IFNAME" not in env and interface:
        # gloo would use the address that the host name resolves to, which is 127.0.1.1 on Debian.
        env["GLOO_SOCKET_IFNAME"] = interface
    return env


def _find_interface(host: str) -> str:
    """Return the interface on the route to ``host``, empty if unknown."""
    with contextlib.suppress(OSError):
        return find_interface_to(str(socket.getaddrinfo(host, None)[0][4][0])) or ""
    return ""


if __name__ == "__main__":
    sys.exit(main())

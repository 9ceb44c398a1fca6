"""``python -m clustertrain.cluster.bench_node``: one process a node. It starts the ranks of one measurement with
torchrun, as the agent does for a run, and leaves none of them behind."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from types import FrameType

from clustertrain import proc, settings
from clustertrain.cluster.node_facts import here
from clustertrain.plan.env import nccl
from clustertrain.scheduler.sockets import free_port, interface_towards


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", default="", help="names, separated by ','; empty: this machine alone")
    parser.add_argument("--ranks", type=int, required=True, help="of each node")
    parser.add_argument("--port", type=int, default=0, help="free on the first node; 0: find one here")
    parser.add_argument("what", choices=("all-reduce", "all-reduce-across"))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options = parser.parse_args()
    nodes = options.nodes.split(",") if options.nodes else []
    rank = int(os.environ.get(settings.SLURM_NODEID, "0")) if len(nodes) > 1 else 0
    master = nodes[0] if len(nodes) > 1 else "127.0.0.1"
    port = options.port or free_port()
    proc.adopt_orphans()
    signal.signal(signal.SIGTERM, _leave)
    child = proc.start(
        [
            *proc.python_module(sys.executable, "torch.distributed.run"),
            "--rdzv-backend=static", f"--master-addr={master}",
            f"--master-port={port}", f"--rdzv-id=measure-{port}",
            f"--nnodes={max(1, len(nodes))}", f"--node-rank={rank}", f"--nproc-per-node={options.ranks}",
            "--max-restarts=0", "--no-python",
            *proc.python_module(sys.executable, "clustertrain.cluster.bench_ranks", options.what),
            "--device", options.device,
        ],
        env=_environment(nodes, rank, options.device),
    )  # fmt: skip
    try:
        return child.wait()
    finally:
        proc.kill_descendants()


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _environment(nodes: list[str], rank: int, device: str) -> dict[str, str]:
    """With what an agent would set on this node, so that the rates are those that runs get."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would choose, with a warning
    several = len(nodes) > 1
    towards = _interface(nodes[1 if rank == 0 else 0] if several else "127.0.0.1")
    if several:
        # No records of a measurement: as if the user had said where they go.
        taken = {*env, "TORCH_FR_DUMP_TEMP_FILE"}
        found = nccl.of_node(device, here(), taken, towards=towards, several_nodes=True, dumps="")
        env |= {name: setting.value for name, setting in found.items()}
    if "GLOO_SOCKET_IFNAME" not in env and towards:
        # gloo would take the address that the host's own name resolves to, which on Debian is 127.0.1.1.
        env["GLOO_SOCKET_IFNAME"] = towards
    return env


def _interface(host: str) -> str:
    """The one that leads to ``host``; empty where that cannot be told."""
    with contextlib.suppress(OSError):
        return interface_towards(str(socket.getaddrinfo(host, None)[0][4][0])) or ""
    return ""


if __name__ == "__main__":
    sys.exit(main())

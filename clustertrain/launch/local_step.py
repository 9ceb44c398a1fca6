"""The local backend's srun: one agent a simulated node, on this machine.

``python -m clustertrain.launch.local_step --nodes N --gpus G -- COMMAND…``
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import FrameType

from clustertrain import clock, proc, settings
from clustertrain.launch.local import node_names

POLL_S = 0.1


def _devices(node: int, gpus: int) -> dict[str, str]:
    """Each simulated node sees its own share of the machine's GPUs."""
    visible = os.environ.get(settings.CUDA_VISIBLE_DEVICES)
    if visible is None:
        shares = [str(i) for i in range(node * gpus, (node + 1) * gpus)]
    else:
        shares = [d for d in visible.split(",") if d][node * gpus : (node + 1) * gpus]
    return {settings.CUDA_VISIBLE_DEVICES: ",".join(shares)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    for rank, name in enumerate(node_names(options.nodes)):
        env = {**os.environ, settings.NODE: name, settings.NODE_RANK: str(rank), **_devices(rank, options.gpus)}
        children.append(proc.start(options.command, env=env))
    clock.wait_until(lambda: all(c.poll() is not None for c in children), float("inf"), POLL_S)
    return max(c.returncode if c.returncode >= 0 else 128 - c.returncode for c in children)


if __name__ == "__main__":
    sys.exit(main())

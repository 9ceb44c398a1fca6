"""The local backend's srun: one agent per simulated node, on this machine.

``python -m clustertrain.scheduler.local_srun --nodes N --gpus G -- COMMAND…``
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from clustertrain import clock, proc, settings
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.local import node_names

POLL_S = 0.1


def _visible_devices(node: int, gpus: int) -> dict[str, str]:
    """Return the variable that gives a simulated node its share of the GPUs."""
    visible = os.environ.get(settings.CUDA_VISIBLE_DEVICES)
    if visible is None:
        devices = [str(i) for i in range(node * gpus, (node + 1) * gpus)]
    else:
        devices = [d for d in visible.split(",") if d][node * gpus : (node + 1) * gpus]
    return {settings.CUDA_VISIBLE_DEVICES: ",".join(devices)}


def _run_task_epilog(node: str) -> None:
    """Run the script that srun would run as --task-epilog."""
    script = RunDir(Path(os.environ[settings.RUN_DIR])).agent_end_script
    if script.exists():  # runs of older versions have none
        subprocess.run(["/bin/sh", script], env={**os.environ, settings.NODE: node}, check=False)


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
    names = node_names(options.nodes)
    for rank, name in enumerate(names):
        env = {**os.environ, settings.NODE: name, settings.NODE_RANK: str(rank), **_visible_devices(rank, options.gpus)}
        children.append(proc.start(options.command, env=env))
    finished: set[str] = set()

    def all_ended() -> bool:
        for name, child in zip(names, children, strict=True):
            if child.poll() is not None and name not in finished:
                finished.add(name)
                _run_task_epilog(name)
        return len(finished) == len(names)

    clock.wait_until(all_ended, float("inf"), POLL_S)
    return max(c.returncode if c.returncode >= 0 else 128 - c.returncode for c in children)


if __name__ == "__main__":
    sys.exit(main())

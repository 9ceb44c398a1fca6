"""Workers of a DataLoader and SIGTERM: the scheduler's ends neither them nor, through them, what they start."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.rank_hooks.clustertrain_hooks.torch_data import _obey_rank_only

HOOKS = Path(__file__).parents[3] / "clustertrain" / "rank_hooks"
WORKER = """
import multiprocessing, os, signal, subprocess, sys, time
from clustertrain_hooks import torch_data
torch_data._obey_rank_only()
os.kill(os.getpid(), signal.SIGTERM)  # not its rank's
context = multiprocessing.get_context("fork")
ready = context.Event()
forked = context.Process(target=lambda: (ready.set(), time.sleep(60)))
forked.start()
ready.wait()
forked.terminate()
forked.join()
started = subprocess.Popen(["sleep", "60"])
started.terminate()
print("alive", forked.exitcode, started.wait(), flush=True)
time.sleep(60)
"""


def test_worker_ends_what_it_starts_and_ends_with_its_rank() -> None:
    env = {**os.environ, "PYTHONPATH": str(HOOKS)}
    with subprocess.Popen([sys.executable, "-c", WORKER], env=env, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "alive -15 -15\n"
        worker.terminate()  # by its parent
        assert worker.wait(30) == 0


def work(is_ready: Event) -> None:
    _obey_rank_only()
    is_ready.set()
    time.sleep(60)


# Not for the slow lane: a test there ends all children of its process, the fork server of multiprocessing included.
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_worker_obeys_its_rank_only(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    is_ready = context.Event()
    worker = context.Process(target=work, args=(is_ready,), daemon=True)
    worker.start()
    try:
        assert is_ready.wait(60)
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # as Slurm sends it to every process
        worker.join(0.3)
        assert worker.exitcode is None
        worker.terminate()
        assert clock.wait_until(lambda: worker.exitcode == 0, 10.0, 0.02)
    finally:
        worker.kill()
        worker.join(10)

"""Workers of a DataLoader and SIGTERM: the scheduler's ends neither them nor, through them, what they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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

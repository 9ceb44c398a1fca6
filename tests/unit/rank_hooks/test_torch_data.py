"""Workers of a ``DataLoader`` end at a SIGTERM of their rank, and at no other one."""

from __future__ import annotations

import multiprocessing
import subprocess
import time
from multiprocessing.synchronize import Event
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.rank_hooks.clustertrain_hooks.torch_data import _obey_rank_only


def work(is_ready: Event) -> None:
    _obey_rank_only()
    is_ready.set()
    time.sleep(60)


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

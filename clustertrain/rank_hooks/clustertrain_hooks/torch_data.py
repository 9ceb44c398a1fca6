"""Waits for ``torch.utils.data.DataLoader``, and workers that outlive the scheduler's SIGTERM.

Slurm sends SIGTERM to every process of a step. Without its workers a program could not train up to the step at which it
stops and saves.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from types import ModuleType
from typing import Any

from .guard import guarded
from .progress import report_wait


def install(module: ModuleType) -> None:
    """Measure and guard the loaders. ``module``: ``torch.utils.data.dataloader``."""
    _measure_waits(module._BaseDataLoaderIter)
    _guard_workers(module._utils.worker)


def _measure_waits(iterator: Any) -> None:
    original = iterator.__next__
    report = guarded(report_wait)

    @functools.wraps(original)
    def measured(self: Any) -> Any:
        begin = time.monotonic()
        try:
            return original(self)
        finally:
            report(begin)

    iterator.__next__ = measured


def _guard_workers(worker: Any) -> None:
    original = worker._worker_loop

    @functools.wraps(original)  # spawned workers find it under its own name
    def guarded_loop(*args: Any, **kwargs: Any) -> Any:
        guarded(_obey_parent_only)()
        return original(*args, **kwargs)

    worker._worker_loop = guarded_loop


def _obey_parent_only() -> None:
    """End this process at a SIGTERM of its parent, and at no other one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_parent, args=(os.getppid(),), name="clustertrain-sigterm", daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    while True:
        info = signal.sigwaitinfo({signal.SIGTERM})
        if info.si_pid == parent:
            os._exit(0)  # as torch's own handler

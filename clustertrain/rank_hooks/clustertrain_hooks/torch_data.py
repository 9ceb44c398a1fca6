"""Waits for ``torch.utils.data.DataLoader``, and workers that outlive the scheduler's SIGTERM.

Slurm sends SIGTERM to every process of a step. Without its workers a program could not train up to the step at which it
stops and saves.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import Any

from .guard import guarded
from .progress import report_wait

_MODULE = "torch.utils.data.dataloader"
_is_installed = False


def install(module: ModuleType) -> None:
    """Measure and guard the loaders. ``module``: ``torch.utils.data.dataloader``."""
    global _is_installed  # noqa: PLW0603
    _is_installed = True
    _measure_waits(module._BaseDataLoaderIter)
    _guard_workers(module._utils.worker)


def guard_workers() -> None:
    """Do so in a program without hooks that stops at an agreed step, if it has imported torch."""
    if not _is_installed and _MODULE in sys.modules:
        install(sys.modules[_MODULE])


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
        guarded(_obey_rank_only)()
        return original(*args, **kwargs)

    worker._worker_loop = guarded_loop


def _obey_rank_only() -> None:
    """End this process at a SIGTERM of its rank, and at no other one."""
    rank = multiprocessing.parent_process()  # with forkserver, not the parent of this process
    sender = rank.pid if rank is not None and rank.pid is not None else os.getppid()
    _mask(signal.SIG_BLOCK)
    os.register_at_fork(after_in_child=functools.partial(_mask, signal.SIG_UNBLOCK))
    _start_unblocked(subprocess.Popen)
    threading.Thread(target=_wait_for, args=(sender,), name="clustertrain-sigterm", daemon=True).start()


def _mask(how: int) -> None:
    signal.pthread_sigmask(how, {signal.SIGTERM})


def _start_unblocked(popen: Any) -> None:
    """Let programs that this worker starts get SIGTERM, with which it may end them: they inherit the mask."""
    original = popen.__init__

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        _mask(signal.SIG_UNBLOCK)
        try:
            original(self, *args, **kwargs)
        finally:
            _mask(signal.SIG_BLOCK)

    popen.__init__ = start


def _wait_for(sender: int) -> None:
    while True:
        info = signal.sigwaitinfo({signal.SIGTERM})
        if info.si_pid == sender:
            os._exit(0)  # as torch's own handler

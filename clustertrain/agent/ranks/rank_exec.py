"""Become the program of a rank: ``python rank_exec.py PARENT LOG CPUS COMMAND…``.

It appends output to LOG, dies with its parent and runs on the cores CPUS (``0,1``; empty: all). SIGUSR1 and SIGUSR2 are
ignored until the program handles them: the scheduler sends its early warning to all processes of a step. SIGUSR1 is not
if it is the stop signal: a shell cannot trap a signal that it was started to ignore.
Only the standard library: it starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as a shell's


def main() -> int:
    parent, log, cpus, *command = sys.argv[1:]
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the call
        return 1
    with contextlib.suppress(OSError, ValueError):
        if cpus:
            os.sched_setaffinity(0, [int(n) for n in cpus.split(",")])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    is_stop_signal = os.environ.get("CLUSTERTRAIN_STOP_SIGNAL") == "USR1"
    signal.signal(signal.SIGUSR1, signal.SIG_DFL if is_stop_signal else signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)
    except OSError as e:
        print(f"clustertrain: {command[0]}: {e.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(e, FileNotFoundError) else NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main())

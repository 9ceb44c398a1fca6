"""Which stop signals Slurm has sent to the ranks of a command, and not to their agent alone.

With ``proctrack/cgroup``, Slurm sends a signal only to the processes that slurmstepd itself has started, here the agent
(SIGKILL goes to all). With ``proctrack/linuxproc`` it sends it to every process of the step.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

from clustertrain import proc
from clustertrain.agent.signals import Signals


class SignalWitness:
    """A child beside the ranks that blocks the stop signals, so that those sent to it stay pending."""

    def __init__(self) -> None:
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, Signals.WATCHED)  # the child inherits it
        try:
            # It ends when its standard input does: at the latest with the agent.
            self._process = proc.start(["/bin/sh", "-c", "read _"], new_session=True, keep_stdin_open=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def has_received(self, number: signal.Signals) -> bool:
        """Return whether the signal was sent to it; False if it was killed."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return False
        masks = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", status, re.MULTILINE)  # of the thread, of the process
        return any(int(mask, 16) & (1 << (number - 1)) for mask in masks)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

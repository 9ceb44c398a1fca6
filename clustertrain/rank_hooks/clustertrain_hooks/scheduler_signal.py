"""The scheduler's SIGTERM at a preemption, for a program that asked for another stop signal.

Slurm sends it to every process of a step, and it would end the program before it has got its own signal.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})  # as in clustertrain.proc


def survive(environ: Mapping[str, str]) -> None:
    """Make SIGTERM do nothing in this process if it is the rank's program and its stop signal is another one.

    Only until the program installs its own handler. The processes that it starts keep the default: it may end them.
    """
    if environ.get("CLUSTERTRAIN_STOP_SIGNAL", "TERM") == "TERM" or not _is_program():
        return
    import signal

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _ignore)
        os.register_at_fork(after_in_child=_restore)


def has_stop_handler(environ: Mapping[str, str]) -> bool:
    """Return whether the program handles SIGTERM or its stop signal itself."""
    import signal

    name = environ.get("CLUSTERTRAIN_STOP_SIGNAL", "TERM")
    numbers = {signal.SIGTERM, getattr(signal, f"SIG{name}", signal.SIGTERM)}
    return any(signal.getsignal(n) not in (signal.SIG_DFL, signal.SIG_IGN, _ignore) for n in numbers)


def _is_program() -> bool:
    """Return whether this process is that of the rank, or was started by a shell, which may be."""
    if os.getpid() == os.getsid(0):
        return True
    try:
        return os.path.basename(os.readlink(f"/proc/{os.getppid()}/exe")) in _SHELLS
    except OSError:  # another user's, or hidden by a container
        return False


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the stop signal comes from the node agent. Not SIG_IGN, which a started program would inherit."""


def _restore() -> None:
    import signal

    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

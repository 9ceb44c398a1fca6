"""Stop requests: all ranks stop at the same step, whichever receives the request, without a device synchronization.

At boundary k (between two steps) each rank posts an asynchronous all-reduce of its flag on a control group and waits
for the one posted at boundary k-1, which had a whole step to complete. If the result of k-1 is set, all ranks see it at
the same k; they wait for the all-reduce of k, so that nothing is left in flight, and stop. The group's timeout is the
deadline. The first boundary waits for its own all-reduce, so that no step runs if a rank was asked to
stop during startup.
"""

from __future__ import annotations

import signal
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from clustertrain import fsio
from clustertrain.checkpoint.core.control_group import ControlGroup

_DOUBLE = struct.Struct("=d")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """This rank's stop request: a signal, or the file ``stop`` that the node agent writes."""

    def __init__(self, rank_dir: Path | None) -> None:
        self._stop_file = rank_dir / "stop" if rank_dir else None
        self._set = False
        self._previous_handlers: dict[int, Any] = {}

    def install(self) -> None:
        """Install signal handlers that only set the flag.

        Child processes get the default action: unlike SIG_IGN, a handler is not inherited through exec.
        """
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {s: signal.signal(s, self._on_signal) for s in SIGNALS}

    def uninstall(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Slurm may send its warning before the time limit to every process, up to a minute early. Under an agent, only
        # the agent knows whether there is time left to train.
        if number != signal.SIGUSR2 or self._stop_file is None:
            self._set = True

    def deadline(self) -> float | None:
        """Return when the process must have ended (UTC epoch s), as written by the agent; None without a deadline."""
        try:
            value = fsio.read_json(self._stop_file) if self._stop_file is not None else None
        except ValueError:
            return None
        return value.get("deadline") if value else None

    def __bool__(self) -> bool:
        if not self._set and self._stop_file is not None:
            self._set = self._stop_file.exists()
        return self._set


class StopAgreement:
    """Agreement of all ranks to stop at the same boundary; :meth:`poll` is collective.

    ``extra_flags``, by name, are reduced together with the stop flag: if one is set on any rank, :meth:`take_flag`
    returns true on all ranks at the same boundary.
    """

    def __init__(
        self,
        should_stop: Callable[[], bool],
        group: ControlGroup | None,
        extra_flags: Mapping[str, Callable[[], bool]] | None = None,
    ) -> None:
        self._should_stop = should_stop
        self._extra_flags = dict(extra_flags or {})
        self._group = group
        self._pending: Callable[[], bytes] | None = None
        self._is_first_poll = True
        self._raised_flags: set[str] = set()
        self.agreed = False

    def poll(self) -> bool:
        """Return whether all ranks stop at this boundary; true from then on. Call it once per boundary."""
        if self.agreed:
            return True
        if self._group is None:
            self._raised_flags.update(name for name, is_set in self._extra_flags.items() if is_set())
            self.agreed = self._should_stop()
            return self.agreed
        if self._is_first_poll:
            self._is_first_poll = False
            self.agreed = self._wait_for_flags(self._post_flags())
            return self.agreed
        previous, self._pending = self._pending, self._post_flags()
        if previous is not None and self._wait_for_flags(previous):
            self.wait_for_pending()
            self.agreed = True
        return self.agreed

    def take_flag(self, name: str) -> bool:
        """Return whether the flag was set on any rank since the last call."""
        was_raised = name in self._raised_flags
        self._raised_flags.discard(name)
        return was_raised

    def _post_flags(self) -> Callable[[], bytes]:
        assert self._group is not None
        flags = bytes([self._should_stop(), *(is_set() for is_set in self._extra_flags.values())])
        return self._group.reduce(flags, _maximum)

    def _wait_for_flags(self, pending: Callable[[], bytes]) -> bool:
        stop, *extra = pending()
        self._raised_flags.update(name for name, raised in zip(self._extra_flags, extra, strict=True) if raised)
        return bool(stop)

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank. Collective; it blocks, so use it only after the agreement."""
        if self._group is None:
            return flag
        return any(self._group.reduce(bytes([flag]), _maximum)())

    def min_over_ranks(self, value: float) -> float:
        """Return the minimum of ``value`` over all ranks. Collective; it blocks like :meth:`any_rank`."""
        if self._group is None:
            return value
        minimum: float = _DOUBLE.unpack(self._group.reduce(_DOUBLE.pack(value), _minimum)())[0]
        return minimum

    def wait_for_pending(self) -> None:
        """Wait for the all-reduce in flight, so that the group can be closed."""
        if self._pending is not None:
            self._wait_for_flags(self._pending)
            self._pending = None


def _maximum(flags: Sequence[bytes]) -> bytes:
    return bytes(map(max, zip(*flags, strict=True)))


def _minimum(values: Sequence[bytes]) -> bytes:
    return min(values, key=_DOUBLE.unpack)

"""Recording of stop signals. Handlers only set a flag, which the loops check."""

from __future__ import annotations

import signal
from types import FrameType


class Signals:
    """The stop signals that this process received. Create it once, in the main thread."""

    WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self.received: list[str] = []
        for s in self.WATCHED:
            signal.signal(s, self._record)
        # A closed terminal must not end a run.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)

    @property
    def first(self) -> str | None:
        return self.received[0] if self.received else None

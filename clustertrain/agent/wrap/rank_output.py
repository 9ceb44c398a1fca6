"""The log of rank 0 on this process's standard output, which is usually the output file of the user's job."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

POLL_S = 0.2
END_S = 5.0  # for the rest of the log, if the reader of standard output is slow
_CHUNK = 1 << 16
_STDOUT = 1


class RankOutput(threading.Thread):
    """A thread that copies what is appended to a log, so that a reader that blocks does not block the caller."""

    def __init__(self, log: Path) -> None:
        super().__init__(name="rank-output", daemon=True)
        self._log = log
        self._ending = threading.Event()

    def run(self) -> None:
        offset = 0
        with contextlib.suppress(OSError):  # standard output is closed or its disk is full: the log itself remains
            while True:
                is_last = self._ending.wait(POLL_S)
                offset = self._copy(offset)
                if is_last:
                    return

    def end(self) -> None:
        """Copy the rest of the log and end."""
        self._ending.set()
        self.join(END_S)

    def _copy(self, offset: int) -> int:
        try:
            file = self._log.open("rb")
        except FileNotFoundError:
            return offset
        with file:
            file.seek(offset)
            while chunk := file.read(_CHUNK):
                offset += len(chunk)
                while chunk:
                    chunk = chunk[os.write(_STDOUT, chunk) :]
        return offset

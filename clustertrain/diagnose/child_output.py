"""Messages from the child process to the runner: one JSON object per line on standard output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import msgspec

from clustertrain import clock
from clustertrain.diagnose.registry import Finding

PROGRESS_INTERVAL_S = 0.1  # minimum, between two progress messages
ProgressCallback = Callable[[int, int], None]  # (completed, total)


class MessageWriter:
    """The only writer to standard output; whatever the user's code prints is redirected to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._last_progress = 0.0

    def __call__(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._out, flush=True)

    def write_finding(self, finding: Finding) -> None:
        self(finding=msgspec.to_builtins(finding))

    def progress_callback(self, check: str) -> ProgressCallback:
        """Return a callback that reports the progress of ``check`` at most every ``PROGRESS_INTERVAL_S``."""

        def report(completed: int, total: int) -> None:
            now = clock.monotonic()
            if now - self._last_progress >= PROGRESS_INTERVAL_S:
                self._last_progress = now
                self(progress=[check, completed, total])

        return report

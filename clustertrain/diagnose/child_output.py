"""What the process of the checks tells the one that has started it: lines of JSON on its standard output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import msgspec

from clustertrain import clock
from clustertrain.diagnose.registry import Finding

BETWEEN_S = 0.1  # two words of progress
Tell = Callable[[int, int], None]


class Teller:
    """Takes standard output away from everybody else: what the user's code prints goes where errors go."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._last = 0.0

    def __call__(self, **told: Any) -> None:
        print(json.dumps(told), file=self._out, flush=True)

    def finding(self, found: Finding) -> None:
        self(finding=msgspec.to_builtins(found))

    def progress_of(self, check: str) -> Tell:
        def tell(done: int, total: int) -> None:
            now = clock.monotonic()
            if now - self._last >= BETWEEN_S:
                self._last = now
                self(progress=[check, done, total])

        return tell

"""Named points of the way that a save takes, where a test can make something go wrong: what is there afterwards must do
for a resume.

``CLUSTERTRAIN_FAULT_AT=point:rank:n:what``: the process of ``rank`` that comes to the point for the ``n``-th time gets
the signal that ``what`` names (KILL, STOP), or meets that failure of the file system (ENOSPC, EIO, …). ORPHAN: its
parent is killed, the rank that a process writes for.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from typing import Final

from clustertrain import settings

POINTS: Final = (
    "before staging",
    "while staging",
    "staged",
    "before writing",
    "while writing",
    "written",
    "handed in",
    "before the marker",
    "after the marker",
    "before the fence",
    "after the fence",
    "while publishing",
    "while pruning",
)
# Where a run has the tier on its nodes' own disks, or copies behind a URL.
TIERS: Final = ("kept", "while copying", "while uploading", "before the remote marker")
# Where a run goes back because training went wrong.
ROLL_BACK: Final = (
    "before the roll-back's record",
    "after the roll-back's record",
    "between two condemned checkpoints",
)
_seen: Counter[str] = Counter()


def reached(point: str, rank: int) -> None:
    asked = os.environ.get(settings.FAULT_AT)
    if not asked:
        return
    name, wanted, nth, what = asked.split(":")
    if name != point or int(wanted) != rank:
        return
    _seen[point] += 1
    if _seen[point] != int(nth):
        return
    if what in ("KILL", "STOP"):
        os.kill(os.getpid(), signal.Signals[f"SIG{what}"])
        return
    if what == "ORPHAN":
        os.kill(os.getppid(), signal.SIGKILL)
        return
    number = getattr(errno, what)
    raise OSError(number, os.strerror(number))

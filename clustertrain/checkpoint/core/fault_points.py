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

SAVE_POINTS: Final = (
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
TIER_POINTS: Final = ("kept", "while copying", "while uploading", "before the remote marker")
# Where a run goes back because training went wrong.
ROLLBACK_POINTS: Final = (
    "before the roll-back's record",
    "after the roll-back's record",
    "between two condemned checkpoints",
)
_hit_counts: Counter[str] = Counter()


def fault_point(point: str, rank: int) -> None:
    spec = os.environ.get(settings.FAULT_AT)
    if not spec:
        return
    target_point, target_rank, target_hit, action = spec.split(":")
    if target_point != point or int(target_rank) != rank:
        return
    _hit_counts[point] += 1
    if _hit_counts[point] != int(target_hit):
        return
    if action in ("KILL", "STOP"):
        os.kill(os.getpid(), signal.Signals[f"SIG{action}"])
        return
    if action == "ORPHAN":
        os.kill(os.getppid(), signal.SIGKILL)
        return
    error_number = getattr(errno, action)
    raise OSError(error_number, os.strerror(error_number))

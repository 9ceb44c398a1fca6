"""Named points in a save or a rollback where a test can inject a fault.

``CLUSTERTRAIN_FAULT_AT=point:rank:n:action`` acts when the process of ``rank`` reaches ``point`` for the ``n``-th time.
``action`` is a signal that the process sends to itself (KILL, STOP), ORPHAN (kill the parent, the rank that a writer
process works for), or the name of an errno to raise (ENOSPC, EIO, …).
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from typing import Final

from clustertrain import settings

SAVE_POINTS: Final = (
    "before_staging",
    "during_staging",
    "after_staging",
    "before_write",
    "during_write",
    "after_write",
    "after_part_done_marker",
    "before_commit_marker",
    "after_commit_marker",
    "before_fence_check",
    "after_fence_check",
    "during_publish",
    "during_prune",
)
# Reached only with node-local checkpoints, or with copies at a URL.
TIER_POINTS: Final = ("after_local_write", "during_copy_to_shared", "during_upload", "before_remote_commit_marker")
# Reached only when the run rolls back after training diverged.
ROLLBACK_POINTS: Final = (
    "before_rollback_record",
    "after_rollback_record",
    "between_invalidated_checkpoints",
)
_hit_counts: Counter[str] = Counter()


def fault_point(point: str, rank: int) -> None:
    """Inject the fault that the environment requests for this point; without a request, do nothing."""
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

"""Only the newest attempt of a run may change its checkpoints.

An older attempt may be alive still: on a node that the scheduler has given up, or in a process that was stopped for a
while. Each change looks at the attempts first, as late as it can, and what an older attempt has begun by then the newer
one puts out of its reach when it restores: it renames the folders of saves under way (docs/decisions/0033).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from clustertrain.checkpoint.format.storage_errors import with_retries
from clustertrain.errors import EXIT_NO_REQUEUE, CheckpointError
from clustertrain.run.run_dir import RunDir


class AttemptSuperseded(CheckpointError):
    """A newer attempt owns the run. Nothing that this one has done is changed, and it can do no more."""

    exit_code = EXIT_NO_REQUEUE


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """``attempt`` is the number of this one in the folder ``run``."""

    run: str
    attempt: int

    def newer_attempt(self) -> int | None:
        """The attempt that owns the run, where it is a newer one. Raises StorageError where that cannot be read."""
        run_dir = RunDir(Path(self.run))
        return with_retries(lambda: run_dir.find_newer_attempt(self.attempt), run_dir.attempts_folder)


def check_fence(fence: Fence | None) -> None:
    """Raises AttemptSuperseded, StorageError. Without a fence, outside a run, nobody else is expected."""
    newer = fence.newer_attempt() if fence is not None else None
    if newer is not None:
        raise AttemptSuperseded(f"taken over by attempt {newer}")

"""The fence: only the newest attempt of a run may change its checkpoints.

An older attempt may still be alive, on a node that the scheduler has given up or in a process that was suspended. Each
change checks for a newer attempt first, as late as possible. An older attempt cannot commit the saves that it started
before, because the restore of the newer attempt renames their folders (docs/decisions/0033).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from clustertrain.checkpoint.format.storage_errors import with_retries
from clustertrain.errors import EXIT_NO_REQUEUE, CheckpointError
from clustertrain.run.run_dir import RunDir


class AttemptSuperseded(CheckpointError):
    """A newer attempt owns the run. The commits of this attempt stay, but it must not change anything anymore."""

    exit_code = EXIT_NO_REQUEUE


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of this attempt."""

    run: str
    """The run's folder."""
    attempt: int
    """The number of this attempt."""

    def newer_attempt(self) -> int | None:
        """Return the newer attempt that owns the run, or None.

        Raises:
            StorageError: the attempts of the run cannot be read.
        """
        run_dir = RunDir(Path(self.run))
        return with_retries(lambda: run_dir.find_newer_attempt(self.attempt), run_dir.attempts_folder)


def check_fence(fence: Fence | None) -> None:
    """Check that no newer attempt owns the run. Without a fence, outside a run, do nothing.

    Raises:
        AttemptSuperseded: a newer attempt owns the run.
        StorageError: the attempts of the run cannot be read.
    """
    newer = fence.newer_attempt() if fence is not None else None
    if newer is not None:
        raise AttemptSuperseded(f"taken over by attempt {newer}")

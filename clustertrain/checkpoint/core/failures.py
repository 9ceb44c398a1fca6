"""What went wrong with a save or a restore, as ranks and processes tell it to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.checkpoint.format.storage_errors import FULL_ERRNOS, StorageError
from clustertrain.errors import CheckpointError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """``why``, and whether it is ``of`` the checkpoint's own content ("state"), a "full" disk, a file system (or
    process) that may do better next time ("storage"), the objects that it should be loaded into ("objects"), or only
    that nobody can wait any longer ("deadline"), or that a newer attempt owns the run ("taken over")."""

    why: str
    of: Literal["state", "full", "storage", "objects", "deadline", "taken over"]


class DeadlineExceeded(CheckpointError):
    """A save was given up at the deadline. What was committed before stands."""


def failure_from_exception(e: OSError | CheckpointError) -> Failure:
    if isinstance(e, OSError):
        return Failure(why=str(e), of="full" if e.errno in FULL_ERRNOS else "storage")
    if isinstance(e, StorageError):
        return Failure(why=e.message, of="full" if e.full else "storage")
    if isinstance(e, AttemptSuperseded):
        return Failure(why=e.message, of="taken over")
    if isinstance(e, DeadlineExceeded):
        return Failure(why=e.message, of="deadline")
    return Failure(why=e.message, of="state")


def error_from_failures(prefix: str, failures: Sequence[Failure]) -> CheckpointError:
    """One exception for the troubles of all ranks. What would not go away by itself decides."""
    message = ": ".join(text for text in (prefix, "; ".join(f.why for f in failures)) if text)
    causes = {t.of for t in failures}
    if "taken over" in causes:
        return AttemptSuperseded(message)
    if "full" in causes:
        return StorageError(message, full=True)
    if "deadline" in causes:  # whatever else there is, the process must end now
        return DeadlineExceeded(message)
    return StorageError(message) if "storage" in causes else CheckpointError(message)

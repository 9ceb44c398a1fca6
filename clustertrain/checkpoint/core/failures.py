"""Failures of a save or a restore, as ranks and writer processes report them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.checkpoint.format.storage_errors import FULL_ERRNOS, StorageError
from clustertrain.errors import CheckpointError

FailureKind = Literal["state", "full", "storage", "objects", "deadline", "superseded"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure on one rank."""

    message: str
    kind: FailureKind
    """
    * state: the checkpoint's content is damaged, or the state cannot be saved
    * full: the disk is full, or the quota is exhausted
    * storage: the file system or the writer process failed; a retry may succeed
    * objects: the checkpoint does not fit the objects to load it into
    * deadline: the process must end before the save can be committed
    * superseded: a newer attempt owns the run
    """


class DeadlineExceeded(CheckpointError):
    """The save was abandoned at the deadline. Earlier commits stay."""


def failure_from_exception(e: OSError | CheckpointError) -> Failure:
    """Return ``e`` as a failure to report to the other ranks."""
    if isinstance(e, OSError):
        return Failure(message=str(e), kind="full" if e.errno in FULL_ERRNOS else "storage")
    if isinstance(e, StorageError):
        return Failure(message=e.message, kind="full" if e.full else "storage")
    if isinstance(e, AttemptSuperseded):
        return Failure(message=e.message, kind="superseded")
    if isinstance(e, DeadlineExceeded):
        return Failure(message=e.message, kind="deadline")
    return Failure(message=e.message, kind="state")


def error_from_failures(prefix: str, failures: Sequence[Failure]) -> CheckpointError:
    """Return one exception for the failures of all ranks. A failure that a retry cannot fix decides its type."""
    message = ": ".join(text for text in (prefix, "; ".join(f.message for f in failures)) if text)
    kinds = {f.kind for f in failures}
    if "superseded" in kinds:
        return AttemptSuperseded(message)
    if "full" in kinds:
        return StorageError(message, full=True)
    if "deadline" in kinds:  # the process must end now, whatever else failed
        return DeadlineExceeded(message)
    return StorageError(message) if "storage" in kinds else CheckpointError(message)

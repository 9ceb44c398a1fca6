"""What went wrong with a save or a restore, as ranks and processes tell it to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from clustertrain.checkpoint.format.fence import TakenOver
from clustertrain.checkpoint.format.storage_errors import FULL, StorageError
from clustertrain.errors import CheckpointError


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """``why``, and whether it is ``of`` the checkpoint's own content ("state"), a "full" disk, a file system (or
    process) that may do better next time ("storage"), the objects that it should be loaded into ("objects"), or only
    that nobody can wait any longer ("deadline"), or that a newer attempt owns the run ("taken over")."""

    why: str
    of: Literal["state", "full", "storage", "objects", "deadline", "taken over"]


class TooLate(CheckpointError):
    """A save was given up at the deadline. What was committed before stands."""


def told(e: OSError | CheckpointError) -> Trouble:
    if isinstance(e, OSError):
        return Trouble(why=str(e), of="full" if e.errno in FULL else "storage")
    if isinstance(e, StorageError):
        return Trouble(why=e.message, of="full" if e.full else "storage")
    if isinstance(e, TakenOver):
        return Trouble(why=e.message, of="taken over")
    if isinstance(e, TooLate):
        return Trouble(why=e.message, of="deadline")
    return Trouble(why=e.message, of="state")


def error(failure: str, troubles: Sequence[Trouble]) -> CheckpointError:
    """One exception for the troubles of all ranks. What would not go away by itself decides."""
    message = ": ".join(p for p in (failure, "; ".join(t.why for t in troubles)) if p)
    causes = {t.of for t in troubles}
    if "taken over" in causes:
        return TakenOver(message)
    if "full" in causes:
        return StorageError(message, full=True)
    if "deadline" in causes:  # whatever else there is, the process must end now
        return TooLate(message)
    return StorageError(message) if "storage" in causes else CheckpointError(message)

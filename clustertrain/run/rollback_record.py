"""The record of a run's rollbacks, `rolled-back.json` in the folder of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from clustertrain import schema
from clustertrain.documentation import page_url

PositionRanges = dict[str, list[list[int]]]
"""Ranges of positions in the stream of each loader, by its name in the state: [first, end), in samples."""
UNREADABLE_FIX = (
    "restore the file from a copy, or delete it as "
    f"{page_url('guides/stability')}#if-the-record-of-rollbacks-is-damaged describes"
)


class RollbackRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollback of the run."""

    last_step: int
    """The last step that went wrong."""
    max_step: int
    """The run returned to a checkpoint of at most this step."""
    reason: str
    """Why the run rolled back, as its event says."""
    count: int
    """Rollbacks without progress between them, including this one."""
    excluded: PositionRanges = {}
    """The samples that later attempts skip; a range ends before its second number."""
    invalidated: tuple[tuple[int, str], ...] = ()
    """(step, commit marker) of the checkpoints that no longer count."""


def decode_records(data: bytes) -> list[RollbackRecord]:
    """Return the records in the content of the file, oldest first.

    Raises:
        msgspec.MsgspecError: the content is something else.
    """
    return schema.decode(data, list[RollbackRecord])


def list_invalidated(records: Sequence[RollbackRecord]) -> list[tuple[int, str]]:
    """Return (step, commit marker) of the checkpoints that no longer count."""
    return [pair for record in records for pair in record.invalidated]

"""The event log of a session: rank 0 of a run writes it, other ranks and sessions outside a run have none."""

from __future__ import annotations

from typing import Any

from clustertrain.run.events import EventLog
from clustertrain.train.core.context import RankContext


class SessionEvents:
    """Events of this rank; dropped on ranks other than 0 and outside a run."""

    def __init__(self, context: RankContext) -> None:
        attempt = context.attempt if context.rank == 0 and context.run is not None else None
        self._log = EventLog(attempt.events_path("rank-0")) if attempt is not None else None

    def emit(self, name: str, **fields: Any) -> None:
        """Append the event ``name``, durably."""
        if self._log is not None:
            self._log.write(name, **fields)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

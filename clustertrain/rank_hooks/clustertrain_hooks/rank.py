"""The rank of this process, and the files that it shares with the node agent."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Rank:
    """One rank of an attempt.

    Attributes:
        rank_dir: folder of the node agent, on the node.
        attempt_dir: folder of the attempt, in the run folder.
    """

    def __init__(self, *, rank: int, world_size: int, attempt: int, run_dir: str, rank_dir: str) -> None:
        self.rank, self.world_size, self.attempt = rank, world_size, attempt
        self.run_dir, self.rank_dir = run_dir, rank_dir
        self.attempt_dir = os.path.join(run_dir, "attempts", str(attempt))

    def read(self, name: str) -> Any:
        """Return the JSON document ``name`` of the rank folder; None if it does not exist."""
        return read_json(os.path.join(self.rank_dir, name))

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        write_json(os.path.join(self.rank_dir, name), document)

    def remove(self, name: str) -> None:
        """Remove ``name`` from the rank folder, if it is there."""
        path = os.path.join(self.rank_dir, name)
        if os.path.exists(path):
            os.unlink(path)


def find_rank(environ: Mapping[str, str]) -> Rank | None:
    """Return the rank whose environment ``environ`` is; None outside a run."""
    try:
        return Rank(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            attempt=int(environ["CLUSTERTRAIN_ATTEMPT"]),
            run_dir=environ["CLUSTERTRAIN_RUN_DIR"],
            rank_dir=environ["CLUSTERTRAIN_RANK_DIR"],
        )
    except (KeyError, ValueError):
        return None


def read_json(path: str) -> Any:
    """Return the JSON document in ``path``; None if it does not exist or is not JSON."""
    import json

    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Replace ``path`` in one step: readers see all of it or what was there before."""
    import json

    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(document, file)
    os.replace(temporary, path)

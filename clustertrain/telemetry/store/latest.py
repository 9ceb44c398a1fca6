"""The newest figures of all nodes of an attempt, read from the run directory: for who looks at a running job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from clustertrain import reading
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.reader import open_node
from clustertrain.telemetry.store.writer import Header

Mark = tuple[tuple[str, int, int], ...]


class NodeNow(msgspec.Struct, frozen=True):
    """A node's newest sample, None where there is none. ``end``: when its sampler stopped, UTC s; None where it did
    not say so. ``failure``: why, where nobody told it to. ``trouble``: what could not be read of it, and why."""

    node: str
    snapshot: Snapshot | None
    header: Header
    end: float | None
    failure: str | None
    trouble: str | None
    reasons: dict[str, str]


class Newest:
    """Reads again and again, and of each node only when its files have changed."""

    def __init__(self, folder: Path) -> None:
        """``folder``: ``attempt.telemetry``."""
        self._folder = folder
        self._known: dict[str, tuple[Mark, NodeNow | None]] = {}

    def read(self) -> list[NodeNow]:
        """By name; without nodes that have recorded nothing yet. Never raises for what another process does."""
        try:
            nodes = sorted(p for p in self._folder.iterdir() if p.is_dir())
        except OSError:
            return []
        return [now for node in nodes if (now := self._node(node)) is not None]

    def _node(self, folder: Path) -> NodeNow | None:
        before, known = self._known.get(folder.name, ((), None))
        mark = _mark(folder)
        if mark == before:
            return known
        now = _read(folder) or known
        self._known[folder.name] = mark, now
        return now


def _mark(folder: Path) -> Mark:
    """Names, sizes and times of what is in the newest segment's folder."""
    try:
        segment = max((p for p in folder.iterdir() if reading.is_count(p.name)), key=lambda p: int(p.name))
        files = [(p.name, p.stat()) for p in sorted(segment.iterdir())]
    except (OSError, ValueError):
        return ()
    return ((segment.name, 0, 0), *((name, s.st_size, s.st_mtime_ns) for name, s in files))


def _read(folder: Path) -> NodeNow | None:
    segments = open_node(folder)
    if not segments:
        return None
    segment = segments[-1]
    header, t = segment.header, segment.newest_t
    if t is None and segment.trouble is None:
        return None
    snapshot = None
    if t is not None:
        mono, values = header.mono + t - header.t, segment.newest()
        snapshot = Snapshot(
            t=t,
            mono=mono,
            node=header.node,
            gpus=header.gpus,
            ranks=header.ranks,
            values=values,
            cpu_allocated=header.cpu_allocated,
        )
    # "trouble" comes last: it is known when all has been read.
    reasons, end, failure = segment.reasons(), segment.end, segment.failure
    return NodeNow(folder.name, snapshot, header, end, failure, segment.trouble, reasons)

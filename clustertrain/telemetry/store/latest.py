"""Newest samples of all nodes of an attempt, read from the run directory, to monitor a running job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from clustertrain import reading
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.reader import open_node
from clustertrain.telemetry.store.writer import Header

FileSignature = tuple[tuple[str, int, int], ...]


class NodeStatus(msgspec.Struct, frozen=True):
    """Newest state of a node's sampler."""

    node: str
    snapshot: Snapshot | None  # the newest sample
    header: Header
    end: float | None
    """When the sampler stopped, UTC s; None if it runs or was killed."""
    failure: str | None
    """Why the sampler stopped, unless it was asked to."""
    read_error: str | None
    """Which part could not be read, and why."""
    reasons: dict[str, str]
    """Last reason for a missing value, by column."""


class LatestReader:
    """Repeated reader that rereads a node only if its files changed."""

    def __init__(self, folder: Path) -> None:
        """Create a reader of ``folder``, which is ``attempt.telemetry``."""
        self._folder = folder
        self._cache: dict[str, tuple[FileSignature, NodeStatus | None]] = {}

    def read(self) -> list[NodeStatus]:
        """Return the nodes with samples, by name. Never raises because of another process's changes."""
        try:
            nodes = sorted(p for p in self._folder.iterdir() if p.is_dir())
        except OSError:
            return []
        return [status for node in nodes if (status := self._read_if_changed(node)) is not None]

    def _read_if_changed(self, folder: Path) -> NodeStatus | None:
        old_signature, cached = self._cache.get(folder.name, ((), None))
        signature = _file_signature(folder)
        if signature == old_signature:
            return cached
        status = _read_node(folder) or cached
        self._cache[folder.name] = signature, status
        return status


def _file_signature(folder: Path) -> FileSignature:
    """Return names, sizes and times of the files in the newest segment's folder."""
    try:
        segment = max((p for p in folder.iterdir() if reading.is_unsigned_int(p.name)), key=lambda p: int(p.name))
        files = [(p.name, p.stat()) for p in sorted(segment.iterdir())]
    except (OSError, ValueError):
        return ()
    return ((segment.name, 0, 0), *((name, s.st_size, s.st_mtime_ns) for name, s in files))


def _read_node(folder: Path) -> NodeStatus | None:
    segments = open_node(folder)
    if not segments:
        return None
    segment = segments[-1]
    header, t = segment.header, segment.newest_t
    if t is None and segment.read_error is None:
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
    # read_error is read last: it is complete only after everything else was read.
    reasons, end, failure = segment.reasons(), segment.end, segment.failure
    return NodeStatus(folder.name, snapshot, header, end, failure, segment.read_error, reasons)

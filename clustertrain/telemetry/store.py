"""The telemetry file of one node and attempt: ``telemetry/<node>/samples.jsonl``, append-only, one writer.

A header says what was allocated; the records after it belong to it, with ``d`` the seconds since the header by the
monotonic clock. A sampler that starts again appends another header. Reasons for missing figures are written when they
change, not with every sample. Only this module knows the format.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from clustertrain import fsio
from clustertrain.telemetry.host import HOST_FIELDS
from clustertrain.telemetry.nvml import FIELDS

_MOST_KEPT = 3600  # records held back while the disk refuses them


class GpuFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """An allocated GPU as it was at the start; ``reason`` where it could not be opened."""

    uuid: str
    index: int | None = None
    minor: int | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_includes_reserved: bool = False
    parent: str | None = None
    reason: str | None = None
    ranks: list[int] = []


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="kind"):
    """``t`` UTC epoch s and ``mono`` monotonic s of d = 0. ``nvml`` says why there are no GPU figures, else None."""

    node: str
    t: float
    mono: float
    interval_s: float
    gpus: list[GpuFacts]
    nvml: str | None = None
    driver: str | None = None
    allocation: str | None = None
    cpu_count: int | None = None
    memory_total_bytes: int | None = None
    gpu_fields: tuple[str, ...] = FIELDS
    host_fields: tuple[str, ...] = HOST_FIELDS


class Sample(msgspec.Struct, frozen=True, tag="s", tag_field="kind"):
    """``h`` in the order of ``host_fields``; ``g`` a list a GPU in the order of ``gpu_fields``, None while lost."""

    d: float
    h: list[float | None]
    g: list[list[float | None] | None]


class Reason(msgspec.Struct, frozen=True, tag="null", tag_field="kind"):
    """From here on the field of GPU number ``gpu`` (None: of the host) is missing for ``reason``; None: it is back."""

    d: float
    gpu: int | None
    field: str
    reason: str | None


class Processes(msgspec.Struct, frozen=True, tag="p", tag_field="kind"):
    """The processes below the agent."""

    d: float
    count: int
    rss_bytes: int
    cpu_cores: float | None


class End(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """The sampler stopped; ``reason`` is None when it was told to."""

    d: float
    reason: str | None = None


Record = Header | Sample | Reason | Processes | End


def path_of(folder: Path) -> Path:
    return folder / "samples.jsonl"


class Writer:
    """Collects records and appends them in batches; a kill loses what was added since the last flush."""

    def __init__(self, folder: Path) -> None:
        self._path = path_of(folder)
        self._appender: fsio.Appender | None = None
        self._waiting: list[Record] = []

    def add(self, record: Record) -> None:
        self._waiting.append(record)
        if len(self._waiting) > _MOST_KEPT:
            # A disk that stays full must not eat the node's memory. The header stays: without it nothing can be read.
            victim = next(i for i, r in enumerate(self._waiting) if not isinstance(r, Header))
            del self._waiting[victim]

    def flush(self, *, sync: bool = False) -> None:
        """Append what waits.

        Raises:
            OSError: the disk refused it; it is kept and written with the next flush.
        """
        try:
            if self._appender is None:
                self._appender = fsio.Appender(self._path)
            self._appender.append(*(msgspec.to_builtins(r) for r in self._waiting), sync=sync)
        except OSError:
            # Opened anew next time, which closes the half line that a full disk leaves. The reader drops repeats.
            self._drop()
            raise
        self._waiting.clear()

    def close(self) -> None:
        """Flush durably and close.

        Raises:
            OSError: the disk refused it.
        """
        try:
            self.flush(sync=True)
        finally:
            self._drop()

    def _drop(self) -> None:
        if self._appender is not None:
            self._appender.close()
            self._appender = None


def read(folder: Path) -> Iterator[Record]:
    """All records of a node's folder in the order they were written.

    Half a line (a writer killed, or still writing), a record of a kind from a later version, and repeats are skipped.
    """
    try:
        data = path_of(folder).read_bytes()
    except FileNotFoundError:
        return
    decode = msgspec.json.Decoder(Record).decode
    header: Header | None = None
    newest = float("-inf")
    for line in data.splitlines():
        try:
            record = decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(record, Header):
            if record == header:
                continue
            header, newest = record, float("-inf")
        elif header is None:
            continue
        elif isinstance(record, Sample):
            if record.d <= newest:
                continue
            newest = record.d
        yield record


def newest(folder: Path, size: int = 1 << 16) -> list[Header | Sample]:
    """The first header, and the headers and samples in the last ``size`` bytes after it; none where nothing was
    written."""
    try:
        with path_of(folder).open("rb") as f:
            first = f.readline()
            f.seek(max(f.tell(), f.seek(0, os.SEEK_END) - size))
            lines = [first, *f.read().splitlines()]
    except FileNotFoundError:
        return []
    decode = msgspec.json.Decoder(Record).decode
    found: list[Header | Sample] = []
    for line in lines:
        try:
            record = decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(record, (Header, Sample)):
            found.append(record)
    return found

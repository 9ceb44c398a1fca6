"""Format of ``samples.jsonl.gz``: one gzip member per flush, each with lines of JSON.

``zcat`` reads it. A member truncated by a kill or a full disk fails its checksum and is skipped; the next one is found
by its first ten bytes, which are constant.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from operator import le
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from clustertrain import reading, schema
from clustertrain.telemetry.fields import Pace
from clustertrain.telemetry.store.limits import MAX_BYTES, MAX_MAGNITUDE, MAX_SECONDS, is_within
from clustertrain.telemetry.store.rollup import Table

NAME = "samples.jsonl.gz"
_MAGIC = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # gzip header without name and time
_TRAILER = struct.Struct("<II")  # CRC-32 and size
_MAX_MEMBER_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 18
_SAMPLES_PREFIX = b'{"kind":"samples"'
_MAX_EXACT_INT = 2.0**53  # up to here a double represents every integer


class SampleBlock(msgspec.Struct, frozen=True, tag="samples", tag_field="kind"):
    """Rows of one pace."""

    pace: Pace
    d: list[float]  # [n], s
    v: list[float | list[float | None] | None]
    """For each column of the header, n values, or one value common to all rows; null if missing."""


class MissingReason(msgspec.Struct, frozen=True, tag="null", tag_field="kind"):
    """Note that a column is missing from ``d`` on for ``reason``; None if it is back."""

    d: float
    column: str
    reason: str | None


class SegmentEnd(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """Note that the sampler stopped; ``reason`` is None if it was asked to."""

    d: float
    reason: str | None = None


Record = SampleBlock | MissingReason | SegmentEnd
_decode = schema.get_decoder(Record).decode
_encode = msgspec.json.Encoder().encode


def build_block(pace: Pace, d: list[float], rows: Table) -> SampleBlock:
    """Build a block from ``rows`` [n, columns], NaN if missing."""
    is_constant = np.all((rows == rows[0]) | (np.isnan(rows) & np.isnan(rows[0])), axis=0)
    with np.errstate(invalid="ignore"):
        as_integers = rows.astype(np.int64)
        is_whole = np.all((rows == as_integers) & (np.abs(rows) < _MAX_EXACT_INT), axis=0)
    # Integers are shorter (65, not 65.0). All columns are converted at once: one by one would dominate the time.
    columns = zip(rows.T.tolist(), as_integers.T.tolist(), is_whole.tolist(), is_constant.tolist(), strict=True)
    column_values = [(integers if exact else floats, one) for floats, integers, exact, one in columns]
    return SampleBlock(pace, d, [values[0] if one else values for values, one in column_values])


def decode_block(block: SampleBlock, columns: list[int]) -> Table:
    """Return the block's values [n, selected columns]; NaN for a column that is absent or has the wrong length."""
    out = np.full((len(block.d), len(columns)), np.nan)
    for i, index in enumerate(columns):
        values = block.v[index] if index < len(block.v) else None
        if values is not None and (not isinstance(values, list) or len(values) == len(block.d)):
            out[:, i] = values
    out[np.abs(out) > MAX_MAGNITUDE] = np.nan
    return out


def encode_member(records: list[Record]) -> bytes:
    """Encode records as a gzip member with one line per record."""
    return compress_member(b"".join(_encode(r) + b"\n" for r in records))  # NaN is encoded as null


def compress_member(text: bytes) -> bytes:
    """Compress ``text`` as a gzip member."""
    # The window is no wider than the text: zlib's full tables are four times as large as a typical flush, and clearing
    # them took longer than compressing it.
    bits = min(max(len(text).bit_length(), 9), zlib.MAX_WBITS)
    compressor = zlib.compressobj(6, zlib.DEFLATED, -bits, min(bits - 6, zlib.DEF_MEM_LEVEL))
    return (
        _MAGIC
        + compressor.compress(text)
        + compressor.flush()
        + _TRAILER.pack(zlib.crc32(text), len(text) & 0xFFFFFFFF)
    )


def _decompress_member(data: memoryview) -> bytes | None:
    """Return the contents of a member, ignoring data after it; None if it is incomplete."""
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        text = decompressor.decompress(data[len(_MAGIC) :], MAX_BYTES)
    except zlib.error:
        return None
    trailer = decompressor.unused_data
    if not decompressor.eof or len(trailer) < _TRAILER.size:
        return None
    return text if _TRAILER.unpack_from(trailer) == (zlib.crc32(text), len(text) & 0xFFFFFFFF) else None


def _decode_records(text: bytes, *, notes_only: bool = False) -> Iterator[Record]:
    for line in text.splitlines():
        if notes_only and line.startswith(_SAMPLES_PREFIX):
            continue
        try:
            record = _decode(line)
        except (msgspec.DecodeError, RecursionError):
            continue  # a record type of a later version
        if _is_valid(record):
            yield record


def _is_valid(record: Record) -> bool:
    """Return whether all times are within a segment and, in a block, ascending."""
    d = record.d
    if not isinstance(d, list):
        return is_within(d, 0.0, MAX_SECONDS)
    return (
        bool(d) and is_within(d[0], 0.0, MAX_SECONDS) and is_within(d[-1], 0.0, MAX_SECONDS) and all(map(le, d, d[1:]))
    )


def is_empty_or_gzip(folder: Path) -> bool:
    """Return whether the file is empty or starts like a gzip file, possibly truncated."""
    with reading.open_regular(folder / NAME) as f:
        return b"\x1f\x8b".startswith(f.read(2))


def read(folder: Path, *, notes_only: bool = False) -> Iterator[Record]:
    """Yield all records, oldest first; ``notes_only`` skips samples, which is much faster.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
    """
    with reading.open_regular(folder / NAME) as f:
        for data in _iter_members(f):
            text = _decompress_member(data)
            if text is not None:
                yield from _decode_records(text, notes_only=notes_only)


def _iter_members(f: BinaryIO) -> Iterator[memoryview]:
    """Yield the data from each member's start to the next member or the end; read at most ``MAX_BYTES``."""
    data, remaining = b"", MAX_BYTES
    while True:
        chunk = f.read(min(_CHUNK_BYTES, remaining))
        remaining -= len(chunk)
        data += chunk
        start = data.find(_MAGIC)
        while start >= 0:
            next_start = data.find(_MAGIC, start + len(_MAGIC))
            if next_start < 0 and chunk:
                break  # the member may continue in the next chunk
            yield memoryview(data)[start : next_start if next_start >= 0 else len(data)]
            start = next_start
        if not chunk:
            return
        # A flush is much smaller: a longer member is damaged.
        is_incomplete = start >= 0 and len(data) - start <= _MAX_MEMBER_BYTES
        data = data[start:] if is_incomplete else data[1 - len(_MAGIC) :]


def read_backwards(folder: Path) -> Iterator[list[Record]]:
    """Yield the records of each member, newest member first; reads the file only as far as needed.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
    """
    with reading.open_regular(folder / NAME) as f:
        start = end = f.seek(0, 2)
        data, chunk = b"", _CHUNK_BYTES
        while True:
            member_start = data.rfind(_MAGIC, 0, end - start)
            if member_start >= 0:
                text = _decompress_member(memoryview(data)[member_start : end - start])
                end = start + member_start
                if text is not None:
                    yield list(_decode_records(text))
            elif start == 0:
                return
            else:
                # Keep the end of a member that crosses the chunk boundary.
                chunk_start = max(0, start - chunk)
                f.seek(chunk_start)
                data = f.read(start - chunk_start) + data[: end - start]
                start, chunk = chunk_start, chunk * 2

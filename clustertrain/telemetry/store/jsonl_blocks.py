"""The form of ``samples.jsonl.gz``: whole gzip members, one a flush, each with lines of JSON.

``zcat`` reads it. A member that was cut off, by a kill or a full disk, is skipped, because its checksum is wrong; the
next is found by its first ten bytes, which are always the same.
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
from clustertrain.telemetry.store.limits import MOST_BYTES, MOST_NUMBER, MOST_S, within
from clustertrain.telemetry.store.rollup import Table

NAME = "samples.jsonl.gz"
_MAGIC = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # no name, no time
_TAIL = struct.Struct("<II")  # CRC-32 and size
_MEMBER_BYTES = 1 << 24
_CHUNK = 1 << 18
_SAMPLES = b'{"kind":"samples"'
_EXACT = 2.0**53  # whole numbers of double precision


class Block(msgspec.Struct, frozen=True, tag="samples", tag_field="kind"):
    """Rows of one pace: ``d`` [n] s, and by column, in the header's order, n values, or one that they all have. Null
    where missing."""

    pace: Pace
    d: list[float]
    v: list[float | list[float | None] | None]


class Reason(msgspec.Struct, frozen=True, tag="null", tag_field="kind"):
    """From ``d`` on the column is missing for ``reason``; None: it is back."""

    d: float
    column: str
    reason: str | None


class End(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """The sampler stopped; ``reason`` is None when it was told to."""

    d: float
    reason: str | None = None


Record = Block | Reason | End
_decode = schema.decoder(Record).decode
_encode = msgspec.json.Encoder().encode


def block(pace: Pace, d: list[float], rows: Table) -> Block:
    """``rows`` [n, columns], NaN where missing, as a block."""
    same = np.all((rows == rows[0]) | (np.isnan(rows) & np.isnan(rows[0])), axis=0)
    with np.errstate(invalid="ignore"):
        whole = rows.astype(np.int64)
        is_whole = np.all((rows == whole) & (np.abs(rows) < _EXACT), axis=0)
    # 65 and not 65.0. All columns at once, as to turn them into lists one by one takes longer than all the rest.
    each = zip(rows.T.tolist(), whole.T.tolist(), is_whole.tolist(), same.tolist(), strict=True)
    chosen = [(integers if exact else floats, one) for floats, integers, exact, one in each]
    return Block(pace, d, [values[0] if one else values for values, one in chosen])


def table(part: Block, columns: list[int]) -> Table:
    """The block's values [n, chosen columns]; a column that it lacks, or has not a value a row of, is
    NaN."""
    out = np.full((len(part.d), len(columns)), np.nan)
    for i, at in enumerate(columns):
        values = part.v[at] if at < len(part.v) else None
        if values is not None and (not isinstance(values, list) or len(values) == len(part.d)):
            out[:, i] = values
    out[np.abs(out) > MOST_NUMBER] = np.nan
    return out


def member(records: list[Record]) -> bytes:
    """A gzip member with a line a record."""
    return packed(b"".join(_encode(r) + b"\n" for r in records))  # NaN is encoded as null


def packed(text: bytes) -> bytes:
    """``text`` as a gzip member."""
    # A window no wider than the text: zlib's full tables are four times as large as what a flush of a node writes, and
    # to clear them took longer than to compress it.
    bits = min(max(len(text).bit_length(), 9), zlib.MAX_WBITS)
    packer = zlib.compressobj(6, zlib.DEFLATED, -bits, min(bits - 6, zlib.DEF_MEM_LEVEL))
    return _MAGIC + packer.compress(text) + packer.flush() + _TAIL.pack(zlib.crc32(text), len(text) & 0xFFFFFFFF)


def _text_of(data: memoryview) -> bytes | None:
    """What a member holds; None where it is not whole. What follows it is not looked at."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        text = unpacker.decompress(data[len(_MAGIC) :], MOST_BYTES)
    except zlib.error:
        return None
    rest = unpacker.unused_data
    if not unpacker.eof or len(rest) < _TAIL.size:
        return None
    return text if _TAIL.unpack_from(rest) == (zlib.crc32(text), len(text) & 0xFFFFFFFF) else None


def _records(text: bytes, *, notes_only: bool = False) -> Iterator[Record]:
    for line in text.splitlines():
        if notes_only and line.startswith(_SAMPLES):
            continue
        try:
            record = _decode(line)
        except (msgspec.DecodeError, RecursionError):
            continue  # of a kind that a later version knows
        if _is_sound(record):
            yield record


def _is_sound(record: Record) -> bool:
    """Its seconds are of a segment, and of a block in order."""
    d = record.d
    if not isinstance(d, list):
        return within(d, 0.0, MOST_S)
    return bool(d) and within(d[0], 0.0, MOST_S) and within(d[-1], 0.0, MOST_S) and all(map(le, d, d[1:]))


def is_begun(folder: Path) -> bool:
    """Whether the file is empty or begins as one does, if only with the first bytes."""
    with reading.opened(folder / NAME) as f:
        return b"\x1f\x8b".startswith(f.read(2))


def read(folder: Path, *, notes_only: bool = False) -> Iterator[Record]:
    """All records, oldest first; ``notes_only``: without the samples, which is far quicker.

    Raises:
        OSError: the file cannot be read; FileNotFoundError where there is none.
    """
    with reading.opened(folder / NAME) as f:
        for data in _candidates(f):
            text = _text_of(data)
            if text is not None:
                yield from _records(text, notes_only=notes_only)


def _candidates(f: BinaryIO) -> Iterator[memoryview]:
    """From each beginning of a member up to the next, or to the end of the file; of a file that no sampler writes,
    in its first bytes."""
    data, left = b"", MOST_BYTES
    while True:
        chunk = f.read(min(_CHUNK, left))
        left -= len(chunk)
        data += chunk
        at = data.find(_MAGIC)
        while at >= 0:
            following = data.find(_MAGIC, at + len(_MAGIC))
            if following < 0 and chunk:
                break  # it may go on
            yield memoryview(data)[at : following if following >= 0 else len(data)]
            at = following
        if not chunk:
            return
        # A flush is much smaller: what goes on longer is damaged.
        goes_on = at >= 0 and len(data) - at <= _MEMBER_BYTES
        data = data[at:] if goes_on else data[1 - len(_MAGIC) :]


def read_backwards(folder: Path) -> Iterator[list[Record]]:
    """The records of each member, newest member first; reads no more of the file than is asked for.

    Raises:
        OSError: the file cannot be read; FileNotFoundError where there is none.
    """
    with reading.opened(folder / NAME) as f:
        start = end = f.seek(0, 2)
        data, chunk = b"", _CHUNK
        while True:
            at = data.rfind(_MAGIC, 0, end - start)
            if at >= 0:
                text = _text_of(memoryview(data)[at : end - start])
                end = start + at
                if text is not None:
                    yield list(_records(text))
            elif start == 0:
                return
            else:
                # A member that reaches over the border keeps its end.
                before = max(0, start - chunk)
                f.seek(before)
                data = f.read(start - before) + data[: end - start]
                start, chunk = before, chunk * 2

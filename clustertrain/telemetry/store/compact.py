"""Compaction of a segment after its attempt: Parquet replaces the samples.

``python -m clustertrain.telemetry.store.compact FOLDER…``

Runs as a separate process at the lowest priority and may be killed at any time: the samples are removed last, after
their replacement was verified and is durable, and readers prefer the samples while they exist. A second run completes
an interrupted one. The caller must not start it within a grace period.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from clustertrain import clock, fsio
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.store import jsonl_blocks, parquet, rollup, totals
from clustertrain.telemetry.store.histogram import Column
from clustertrain.telemetry.store.reader import RecordedSegment
from clustertrain.telemetry.store.rollup import LEVELS, Table
from clustertrain.telemetry.store.writer import HEADER, read_header

Outcome = Literal["compacted", "nothing to do", "still written"]
_ROWS = 16_384  # per row group: 330 MB of memory for 8 GPUs. Twice as many save 0.2 % of the bytes but need 485 MB
_QUIET_S = 1200.0  # twice the longest flush interval


def compact(folder: Path, *, ended: bool = False) -> Outcome:
    """Compact a segment (``attempts/<n>/telemetry/<node>/<k>``).

    Args:
        ended: the sampler is known to be gone. Otherwise a segment without an end record is skipped until 20 minutes
            after its last write, because samples appended to a removed file would be lost.

    Raises:
        OSError: the segment cannot be read or written; it is unchanged.
        ValueError: the segment is damaged, or verification failed; it is unchanged.
    """
    samples = folder / jsonl_blocks.NAME
    header = read_header(folder)
    segment = RecordedSegment(folder, header)
    try:
        quiet_s = clock.now() - samples.stat().st_mtime
    except FileNotFoundError:
        _remove_leftovers(folder)
        return "nothing to do"
    if not ended and segment.end is None and quiet_s < _QUIET_S:
        return "still written"
    try:
        _write_rollups_and_totals(segment)
        _to_parquet(segment)
    except FileNotFoundError:
        if samples.exists():
            raise
        return "nothing to do"  # another process was faster
    fsio.fsync_folder(folder)
    samples.unlink(missing_ok=True)  # last: while it exists, a second run starts over
    _remove_leftovers(folder)
    return "compacted"


def _write_rollups_and_totals(segment: RecordedSegment) -> None:
    """Write the packed roll-ups and the totals, including samples that a killed sampler had not aggregated."""
    folder, header = segment.folder, segment.header
    for step in LEVELS:
        segment_rollup = segment.rollup(step)
        buckets = rollup.Buckets(
            segment_rollup.t - header.t,
            segment_rollup.count,
            segment_rollup.mean,
            segment_rollup.low,
            segment_rollup.high,
        )
        records = rollup.to_records(buckets)
        if step == LEVELS[0]:
            fsio.write_bytes(rollup.packed_path(folder, step), rollup.pack(records))
            rollup.rollup_path(folder, step).unlink(missing_ok=True)
        else:
            fsio.write_bytes(rollup.rollup_path(folder, step), records.tobytes())
    sums = segment.sums()
    if segment.read_error is not None:
        raise ValueError(segment.read_error)
    sums.is_final = True
    fsio.write_bytes(folder / totals.NAME, totals.dump(sums))


def _to_parquet(segment: RecordedSegment) -> None:
    folder, header = segment.folder, segment.header
    records = jsonl_blocks.read(folder, notes_only=True)
    reasons = [(r.d, r.column, r.reason) for r in records if isinstance(r, jsonl_blocks.MissingReason)]
    paces: tuple[Pace, ...] = (FAST, SLOW)
    with contextlib.ExitStack() as stack:
        writers = {pace: parquet.ParquetWriter(folder, header, pace, reasons) for pace in paces}
        for writer in writers.values():
            stack.callback(writer.drop)
        for pace, d, rows in _row_groups(jsonl_blocks.read(folder), {p: len(header.columns(p)) for p in paces}):
            writers[pace].add(d, rows)
        for writer in writers.values():
            writer.finish()


def _row_groups(
    records: Iterable[jsonl_blocks.Record], widths: dict[Pace, int]
) -> Iterator[tuple[Pace, Column, Table]]:
    """Yield the samples in groups of at least ``_ROWS`` rows, so that a week need not fit into memory."""
    pending: dict[Pace, list[tuple[Column, Table]]] = {pace: [] for pace in widths}
    newest = dict.fromkeys(widths, -np.inf)
    for record in records:
        if not isinstance(record, jsonl_blocks.SampleBlock):
            continue
        pace = record.pace
        d = np.array(record.d)
        keep = d > newest[pace]
        if not keep.any():
            continue
        newest[pace] = d[-1]
        pending[pace].append((d[keep], jsonl_blocks.decode_block(record, list(range(widths[pace])))[keep]))
        if sum(len(d) for d, _ in pending[pace]) >= _ROWS:
            yield pace, *_concatenate(pending[pace])
            pending[pace] = []
    for pace, chunks in pending.items():
        if chunks:
            yield pace, *_concatenate(chunks)


def _concatenate(chunks: list[tuple[Column, Table]]) -> tuple[Column, Table]:
    return np.concatenate([d for d, _ in chunks]), np.concatenate([rows for _, rows in chunks])


def _remove_leftovers(folder: Path) -> None:
    """Remove partial files of a killed run."""
    for leftover in folder.glob(".[frst]*"):  # not .nfs…, a removed file that is still open
        leftover.unlink(missing_ok=True)


def list_segments(folder: Path) -> list[Path]:
    """List the segments at or below ``folder``: a segment, a node's folder, or an attempt's telemetry."""
    return sorted(header.parent for header in folder.rglob(HEADER))


def main(argv: Sequence[str] | None = None) -> int:
    """Compact the segments in the given folders; return exit status 1 if a segment failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m clustertrain.telemetry.store.compact", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a segment, a node or an attempt")
    parser.add_argument("--ended", action="store_true", help="all samplers have ended, including killed ones")
    parser.add_argument("--at-least", type=int, default=0, metavar="BYTES", help="skip segments with fewer bytes")
    parser.add_argument("--quiet", action="store_true", help="report only failures")
    options = parser.parse_args(argv)
    os.nice(19)
    failed = 0
    for folder in (segment for root in options.folders for segment in list_segments(root)):
        try:
            if _sample_bytes(folder) < options.at_least:
                continue
            outcome = compact(folder, ended=options.ended)
            if not options.quiet:
                print(f"{folder}: {outcome}")
        except (OSError, ValueError, UnsuitableEnvironment) as e:
            print(f"{folder}: {e}", file=sys.stderr)
            failed = 1
    return failed


def _sample_bytes(folder: Path) -> int:
    """Return the size of the samples, including the output of an interrupted compaction."""
    files = [folder / jsonl_blocks.NAME, *folder.glob("*.parquet")]
    return sum(f.stat().st_size for f in files if f.exists())


if __name__ == "__main__":
    sys.exit(main())

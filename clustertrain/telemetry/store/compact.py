"""After an attempt: Parquet in the place of a segment's samples.

``python -m clustertrain.telemetry.store.compact FOLDER…``

A process of its own, at the lowest priority, which may be killed at any moment: the samples are removed last, after
what replaces them was read back and is durable, and readers prefer them as long as they are there. A second run
completes what the first began. Never within a grace time: whoever starts it sees to that.
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
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.store import jsonl_blocks, parquet, rollup, totals
from clustertrain.telemetry.store import writer as store
from clustertrain.telemetry.store.histogram import Column
from clustertrain.telemetry.store.reader import Segment
from clustertrain.telemetry.store.rollup import LEVELS, Table

Outcome = Literal["compacted", "nothing to do", "still written"]
_ROWS = 16_384  # a row group; of 8 GPUs 330 MB of memory in all. Twice as many save 0.2 % of the bytes and take 485 MB
_QUIET_S = 1200.0  # twice the longest time between two flushes


def compact(folder: Path, *, ended: bool = False) -> Outcome:
    """Compact a segment (``attempts/<n>/telemetry/<node>/<k>``).

    Args:
        ended: its sampler is gone, also where it did not say so. Else such a segment is left alone until nothing was
            written for 20 minutes, for what a sampler appends to a file that was removed is lost.

    Raises:
        OSError: it cannot be read or written; it is as it was.
        ValueError: it is damaged, or what was read back is not what was written; it is as it was.
    """
    samples = folder / jsonl_blocks.NAME
    header = store.read_header(folder)
    segment = Segment(folder, header)
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
        return "nothing to do"  # another process was quicker
    fsio.fsync_folder(folder)
    samples.unlink(missing_ok=True)  # last: as long as it is there, a second run begins at the beginning
    _remove_leftovers(folder)
    return "compacted"


def _write_rollups_and_totals(segment: Segment) -> None:
    """Write the roll-ups as they are packed, and first what a killed sampler did not add up any more."""
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
    sums.complete = True
    fsio.write_bytes(folder / totals.NAME, totals.dump(sums))


def _to_parquet(segment: Segment) -> None:
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
    """The samples in pieces of ``_ROWS`` or a little more, so that a week does not have to fit into memory."""
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
    """Remove what a run that was killed left half written."""
    for leftover in folder.glob(".[frst]*"):  # and not .nfs…, which is a file that somebody reads
        leftover.unlink(missing_ok=True)


def list_segments(folder: Path) -> list[Path]:
    """The folders of segments at ``folder`` or below it: a segment, a node's folder, or an attempt's telemetry."""
    return sorted(header.parent for header in folder.rglob(store.HEADER))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 where a segment could not be compacted."""
    parser = argparse.ArgumentParser(prog="python -m clustertrain.telemetry.store.compact", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a segment's, node's or attempt's")
    parser.add_argument("--ended", action="store_true", help="the samplers are gone, also those that did not say so")
    parser.add_argument("--at-least", type=int, default=0, metavar="BYTES", help="leave fewer samples as they are")
    parser.add_argument("--quiet", action="store_true", help="tell of failures alone")
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
        except (OSError, ValueError) as e:
            print(f"{folder}: {e}", file=sys.stderr)
            failed = 1
    return failed


def _sample_bytes(folder: Path) -> int:
    """Of the samples; what of a compaction is to be completed counts as well."""
    files = [folder / jsonl_blocks.NAME, *folder.glob("*.parquet")]
    return sum(f.stat().st_size for f in files if f.exists())


if __name__ == "__main__":
    sys.exit(main())

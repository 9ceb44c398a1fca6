"""Links to the frozen files of the last committed checkpoint, instead of the same bytes once more.

What training does not change (the base of an adapter, a frozen encoder) is in files of its own. If its checksums are
those in the last committed checkpoint, a save gives these files a second name in its own folder, a hard link. Every
folder is therefore complete: readers need not know of links, and a deleted checkpoint takes no bytes with it that
another one has.

A link shares damage too. So a save links only a file of the expected size, and reads a part of its blocks first, so
that a few saves in a row verify the whole file; after damage, it writes the bytes again. A file that cannot be linked
(another file system, one without hard links, another owner, a checkpoint that was just deleted) is written as well.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from clustertrain.checkpoint.core.retention import read_marker
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES, compare_blocks
from clustertrain.checkpoint.format.manifest import (
    ShardRecord,
    has_commit_marker,
    list_checkpoint_folders,
    read_manifest,
)
from clustertrain.checkpoint.format.shard_io import read_into
from clustertrain.checkpoint.format.staged_segments import MIN_FROZEN_BYTES, Segment, SegmentLocation
from clustertrain.checkpoint.format.storage_errors import warn_once
from clustertrain.checkpoint.save.engines import get_engine
from clustertrain.checkpoint.save.writer_jobs import WriteJob
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)

MAX_LINKS = 8  # files of a rank; each may contain some bytes that no tensor needs anymore
VERIFIED_FRACTION = 8  # a save verifies one in eight blocks of the files that it links
_phases: dict[str, int] = {}  # which of them, by file name; at first a random one


@dataclass(frozen=True)
class SavedShard:
    """A frozen shard in an earlier save."""

    dtype: str
    tensor_shape: tuple[int, ...]
    record: ShardRecord

    def has_form_of(self, segment: Segment) -> bool:
        return (self.dtype, self.tensor_shape, self.record.shape) == (segment.dtype, segment.shape, segment.chunk_shape)


@dataclass(frozen=True)
class SavedPart:
    """The frozen files of this rank in an earlier save."""

    folder: Path
    sizes: Mapping[str, int]
    """By file name."""
    shards: Mapping[tuple[str, tuple[int, ...]], SavedShard]
    """By tensor and start."""
    marker: str | None
    """The commit marker, by which a checkpoint is recognized."""


@dataclass(frozen=True)
class LinkedSegments:
    """The segments whose bytes are in linked files, by their number."""

    files: list[str] = field(default_factory=list)
    locations: dict[int, SegmentLocation] = field(default_factory=dict)
    block_hashes: dict[int, str] = field(default_factory=dict)
    """The checksums that the comparison has computed: of all blocks up to the first that has changed."""

    def select_rest(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the segments to write. A few frozen bytes that have changed go to what is trained."""
        rest = [s for n, s in enumerate(segments) if n not in self.locations]
        if self.files and sum(s.nbytes for s in rest if s.is_frozen) < MIN_FROZEN_BYTES:
            return [msgspec.structs.replace(s, is_frozen=False) if s.is_frozen else s for s in rest]
        return rest

    def merge_locations(self, written: Sequence[SegmentLocation], count: int) -> list[SegmentLocation]:
        """Return the location of each of ``count`` segments.

        ``written``: locations of the segments that :meth:`select_rest` returned.
        """
        rest = iter(written)
        return [self.locations[n] if n in self.locations else next(rest) for n in range(count)]


def find_saved_part(root: Path, job: WriteJob) -> SavedPart | None:
    """Return the frozen files of this rank in the last committed checkpoint in ``root``, or None.

    The manifest is read only if the job has frozen segments and its engine keeps them apart.
    """
    pattern = get_engine(job.engine).frozen_pattern.format(rank=job.rank)
    if not pattern or not any(s.is_frozen for s in job.segments):
        return None
    try:
        folder = next((p for p in reversed(list_checkpoint_folders(root)) if has_commit_marker(p)), None)
        if folder is None:
            return None
        marker = read_marker(folder)  # before the manifest, which may be replaced in between
        manifest = read_manifest(folder)
    except CheckpointError as e:
        log.warning("%s; the new checkpoint links nothing", e.message)
        return None
    shards = {
        (tensor.name, shard.start): SavedShard(tensor.dtype, tensor.shape, shard)
        for tensor in manifest.tensors
        for shard in tensor.shards
        if fnmatchcase(shard.file, pattern)
    }
    return SavedPart(folder, manifest.files, shards, marker)


def link_unchanged(
    folder: Path, saved: SavedPart | None, segments: Sequence[Segment], memory: memoryview
) -> LinkedSegments:
    """Link the files of ``saved`` that have the bytes of frozen segments into ``folder``, and return these segments.

    Only segments with a counterpart in ``saved`` are compared, one block first, so nothing is hashed in vain.
    """
    linked = LinkedSegments()
    for name, numbers in _list_candidates(saved, segments) if saved is not None else ():
        assert saved is not None
        records = {n: saved.shards[segments[n].name, segments[n].start].record for n in numbers}
        for n, record in records.items():
            s = segments[n]
            data = memory[s.buffer_offset : s.buffer_offset + s.nbytes]
            linked.block_hashes[n] = compare_blocks(data, record.blocks)
        unchanged = {n: record for n, record in records.items() if linked.block_hashes[n] == record.blocks}
        if link_file(folder, saved, name, list(unchanged.values())):
            linked.files.append(name)
            linked.locations.update((n, SegmentLocation(file=name, offset=r.offset)) for n, r in unchanged.items())
    return linked


def _list_candidates(saved: SavedPart, segments: Sequence[Segment]) -> list[tuple[str, list[int]]]:
    """Return the files of ``saved`` that may be linked, each with the numbers of the segments that it may contain."""
    numbers_by_file: dict[str, list[int]] = {}
    for n, segment in enumerate(segments):
        shard = saved.shards.get((segment.name, segment.start)) if segment.is_frozen and segment.nbytes else None
        if shard is not None and shard.has_form_of(segment):
            numbers_by_file.setdefault(shard.record.file, []).append(n)
    by_size = sorted(numbers_by_file.items(), key=lambda item: -sum(segments[n].nbytes for n in item[1]))
    return by_size[:MAX_LINKS]


def link_file(folder: Path, saved: SavedPart, name: str, shards: Collection[ShardRecord]) -> bool:
    """Link the file ``name`` of ``saved`` into ``folder``, and return whether that succeeded.

    It is not tried if the needed ``shards`` are less than half of the file: the rest would occupy the disk for nothing.
    """
    if not 0 < saved.sizes.get(name, 0) <= 2 * sum(s.nbytes for s in shards):
        return False
    path, target = saved.folder / name, folder / name
    try:
        _verify_some(saved, name, shards)
        os.link(path, target)
        if _is_whole(target, saved.sizes[name]) and _still_exists(saved):
            return True
        problem = f"{path}: is not the file that was written"
    except OSError as e:
        problem = f"{saved.folder.parent}: no files of older checkpoints can be linked: {e.strerror or e}"
    except CheckpointError as e:
        problem = e.message
    with suppress(OSError):
        target.unlink(missing_ok=True)
    if _still_exists(saved):  # otherwise it was deleted or replaced meanwhile, which is no problem
        warn_once(log, f"{problem}; the new checkpoint has its own copy")
    return False


def _verify_some(saved: SavedPart, name: str, shards: Collection[ShardRecord]) -> None:
    """Verify one of :data:`VERIFIED_FRACTION` blocks, others than before."""
    phase = _phases.get(name, os.urandom(1)[0]) % VERIFIED_FRACTION
    _phases[name] = phase + 1
    buffer = memoryview(bytearray(BLOCK_BYTES))
    blocks = ((shard, low) for shard in shards for low in range(0, shard.nbytes, BLOCK_BYTES))
    for shard, low in itertools.islice(blocks, phase, None, VERIFIED_FRACTION):
        read_into(buffer[: min(BLOCK_BYTES, shard.nbytes - low)], saved.folder, shard, low, alone=True)


def _is_whole(target: Path, size: int) -> bool:
    target_stat = target.lstat()
    return stat.S_ISREG(target_stat.st_mode) and target_stat.st_size == size


def _still_exists(saved: SavedPart) -> bool:
    """Return whether no other checkpoint has replaced ``saved``; after a link, it is then one of its files."""
    with suppress(OSError, CheckpointError):
        return read_marker(saved.folder) == saved.marker
    return False

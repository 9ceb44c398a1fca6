"""Write one rank's part of a checkpoint, and commit the parts of all ranks.

The ranks' writers share only the folder. Each writes a file ``.rank-<r>.done`` when its part is durable. Rank 0's
writer waits for all of these files, writes the manifest, then the commit marker, and renames the folder to its final
name.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock, fsio, schema
from clustertrain.checkpoint.core import fault_points, retention
from clustertrain.checkpoint.format import checksums, fence
from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.checkpoint.format.manifest import (
    FORMAT_VERSION,
    Manifest,
    ShardRecord,
    TensorRecord,
    check_manifest,
    has_commit_marker,
    read_manifest,
    replaced_folder,
    step_folder,
    write_manifest,
)
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.checkpoint.save.engines import Engine, get_engine
from clustertrain.checkpoint.save.links import SavedPart, find_saved_part, link_unchanged
from clustertrain.checkpoint.save.writer_jobs import CommitJob, WriteJob
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)


# The keys in the done-file are older than the names here; another attempt may read one from a node's own disk.
_PART_KEYS = {"locations": "places", "block_hashes": "blocks", "rank_values": "own"}


class PartRecord(msgspec.Struct, frozen=True, kw_only=True, rename=_PART_KEYS):
    """The content of a done-file: the part that one rank has written."""

    segments: list[Segment]
    locations: list[SegmentLocation]
    """The location of each segment, in the same order."""
    block_hashes: list[str]
    """The hashes of the blocks of each segment, as one string."""
    rank_values: Any
    """The JSON values of this rank."""
    linked: list[str] = []
    """Names of the files that are links to files of an earlier checkpoint."""


class CommitAborted(CheckpointError):
    """The commit was aborted because another rank could not write its part."""


def done_file(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.done"


def write_and_mark_done(job: WriteJob, memory: memoryview) -> int:
    """Write a part and its done-file, and return the size of the part.

    Raises:
        OSError: the disk is full, the quota is spent, …
    """
    folder = Path(job.folder)
    if not is_part_complete(job):
        part = write_part(folder, job, memory, find_saved_part(folder.parent, job))
        fault_points.fault_point("after_write", job.rank)
        mark_part_done(folder, job.rank, part)
        fault_points.fault_point("after_part_done_marker", job.rank)
    return sum(s.nbytes for s in job.segments)


def is_part_complete(job: WriteJob) -> bool:
    """Return whether an earlier writer, since killed, has completed this part.

    The part must then not be written again: rank 0 may be reading it, or may have committed it.
    """
    folder = Path(job.folder)
    # In this order: rank 0 writes the commit marker, removes the done-files, and renames the folder.
    if done_file(folder, job.rank).exists() or has_commit_marker(folder):
        with suppress(FileNotFoundError):  # renamed meanwhile
            fsio.fsync_folder(folder)
        return True
    return not folder.exists() and is_commit_of(step_folder(folder.parent, job.step), folder)


def is_commit_of(final: Path, staging: Path) -> bool:
    """Return whether ``final`` is committed and was written in ``staging``."""
    return has_commit_marker(final) and read_manifest(final).made_in == staging.name


def write_part(folder: Path, job: WriteJob, memory: memoryview, saved: SavedPart | None) -> PartRecord:
    """Write a part into ``folder``, and compute the checksums of the staged bytes at the same time.

    Args:
        saved: the files of an earlier save that may be linked.

    Raises:
        OSError: see :func:`write_and_mark_done`.
    """
    if any(s.buffer_offset + s.nbytes > len(memory) for s in job.segments):
        raise CheckpointError(f"{folder}: the part is larger than its staging buffer")
    writer_engine = get_engine(job.engine)
    remove_part_files(folder, writer_engine, job.rank)
    linked = link_unchanged(folder, saved, job.segments, memory)
    block_hashes: list[str] = []
    errors: list[BaseException] = []

    def hash_all() -> None:
        try:
            block_hashes.extend(
                checksums.block_checksums(
                    memory[s.buffer_offset : s.buffer_offset + s.nbytes], linked.block_hashes.get(n, "")
                )
                for n, s in enumerate(job.segments)
            )
        except BaseException as e:  # raised again below, in the thread that waits for this one
            errors.append(e)

    hash_thread = threading.Thread(target=hash_all)
    hash_thread.start()
    try:
        fault_points.fault_point("before_write", job.rank)
        written = writer_engine.write(folder, job.rank, linked.select_rest(job.segments), memory)
    finally:
        hash_thread.join()
    if errors:
        raise errors[0]
    return PartRecord(
        segments=job.segments,
        locations=linked.merge_locations(written, len(job.segments)),
        block_hashes=block_hashes,
        rank_values=job.rank_values,
        linked=linked.files,
    )


def mark_part_done(folder: Path, rank: int, part: PartRecord) -> None:
    """Write the done-file of a part that is durable."""
    fsio.write_bytes(done_file(folder, rank), msgspec.json.encode(part))


def list_part_files(folder: Path, writer_engine: Engine, rank: int) -> list[Path]:
    """Return the files and folders in ``folder`` that ``rank`` has written."""
    return [path for pattern in writer_engine.patterns for path in sorted(folder.glob(pattern.format(rank=rank)))]


def remove_part_files(folder: Path, writer_engine: Engine, rank: int) -> None:
    """Remove the files of this part that a killed writer has left."""
    for path in list_part_files(folder, writer_engine, rank):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def commit(
    job: CommitJob,
    should_continue: Callable[[], bool],
    can_prune: Callable[[], bool],
    get_protected: Callable[[], Collection[int]] = tuple,
) -> Manifest:
    """Wait for all parts, commit them, and return the manifest.

    If the process of an earlier call was killed, continue where it stopped.

    Args:
        should_continue: returns False once the commit is aborted.
        can_prune: returns whether older checkpoints may be deleted; not while another attempt may be reading them.
        get_protected: returns the steps that must not be deleted now.

    Raises:
        OSError: see :func:`write_and_mark_done`.
        AttemptSuperseded: a newer attempt owns the run.
        CheckpointError: a rank did not write its part, or the parts do not form complete tensors.
    """
    folder, final = Path(job.folder), step_folder(Path(job.root), job.step)
    if not folder.exists() and is_commit_of(final, folder):
        fsio.fsync_folder(final.parent)
        return read_manifest(final)
    try:
        manifest = read_manifest(folder) if has_commit_marker(folder) else _write_manifest(folder, job, should_continue)
        for rank in range(job.world_size):
            done_file(folder, rank).unlink(missing_ok=True)
        fault_points.fault_point("before_fence_check", 0)
        # As late as possible, and after the folder was created: a newer attempt that claims the run after this check
        # finds the folder and removes it, or finds the checkpoint and resumes from it.
        fence.check_fence(job.fence)
        fault_points.fault_point("after_fence_check", 0)
        publish(folder, final)
    except BaseException as e:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(e, (OSError, CheckpointError)):
            fence.check_fence(job.fence)  # a newer attempt may have removed the folder
        raise
    if can_prune():
        _prune(job, get_protected())
    return manifest


def _write_manifest(folder: Path, job: CommitJob, should_continue: Callable[[], bool]) -> Manifest:
    """Write the manifest of all parts, and the commit marker."""
    parts = _wait_for_parts(folder, job, should_continue)
    for leftover in set(folder.glob(".*")) - {done_file(folder, r) for r in range(job.world_size)}:
        leftover.unlink()  # of a killed writer
    tensors = merge_parts(parts)
    get_engine(job.engine).finish(folder, tensors)
    manifest = Manifest(
        format=FORMAT_VERSION,
        torch=job.torch,
        step=job.step,
        made_in=folder.name,
        world_size=job.world_size,
        engine=job.engine,
        reason=job.reason,
        metric=job.metric,
        about=job.about,
        layout=job.layout,
        files=_list_file_sizes(folder, job.world_size),
        linked=tuple(sorted(name for part in parts for name in part.linked)),
        tensors=tensors,
        values={**job.values, "ranks": {str(r): part.rank_values for r, part in enumerate(parts)}},
    )
    check_manifest(folder, manifest)  # the files must be as long as the parts record
    fault_points.fault_point("before_commit_marker", 0)
    write_manifest(folder, manifest)
    fault_points.fault_point("after_commit_marker", 0)
    return manifest


def _wait_for_parts(folder: Path, job: CommitJob, should_continue: Callable[[], bool]) -> list[PartRecord]:
    parts: dict[int, PartRecord] = {}

    def collect_parts() -> bool:
        # List the folder: an NFS client that did not find a file once caches its absence for up to a minute.
        names = {p.name for p in with_retries(lambda: list(folder.iterdir()), folder)}
        for rank in range(job.world_size):
            path = done_file(folder, rank)
            if rank not in parts and path.name in names:
                with suppress(FileNotFoundError, msgspec.DecodeError):  # still incomplete
                    parts[rank] = schema.decode(with_retries(path.read_bytes, path), PartRecord)
        return len(parts) == job.world_size or not should_continue()

    clock.wait_until(collect_parts, job.rank_timeout_s, 0.05)
    if not should_continue() and len(parts) < job.world_size:
        raise CommitAborted("the commit was aborted")
    if len(parts) < job.world_size:
        missing = next(r for r in range(job.world_size) if r not in parts)
        raise StorageError(f"rank {missing} had not written its part {job.rank_timeout_s:g} s after rank 0")
    return [parts[r] for r in range(job.world_size)]


def _list_file_sizes(folder: Path, ranks: int) -> dict[str, int]:
    done_files = {done_file(folder, r) for r in range(ranks)}
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p not in done_files)
    return {str(p.relative_to(folder)): p.stat().st_size for p in files}


def publish(staging: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name.

    The checkpoint that it replaces is deleted last. After a kill in between, the sweep before a restore recovers it.
    """
    replaced = replaced_folder(final)
    if final.exists():
        final.rename(replaced)
    try:
        fault_points.fault_point("during_publish", 0)
        staging.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    fsio.fsync_folder(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # if this fails, the sweep of the next restore deletes it


def _prune(job: CommitJob, protected: Collection[int]) -> None:
    root = Path(job.root)
    try:
        fault_points.fault_point("during_prune", 0)
        # Do not read all bytes again, which would take as long as a restore after each save.
        retention.delete_expired(
            root, job.policy, is_valid=retention.has_expected_sizes, protected=protected, fence=job.fence
        )
    except AttemptSuperseded as e:
        log.warning("%s: old checkpoints in %s are not deleted", e, root)
    except (OSError, StorageError) as e:
        # The new checkpoint is committed, so an old one that cannot be deleted does not end the run.
        log.warning("old checkpoints in %s could not be deleted: %s", root, e)


def merge_parts(parts: Iterable[PartRecord]) -> tuple[TensorRecord, ...]:
    """Return one record per logical tensor, from the parts of all ranks.

    Raises:
        CheckpointError: the shards of a tensor do not cover it, because the ranks hold different state.
    """
    segments: dict[str, Segment] = {}
    shards: dict[str, list[ShardRecord]] = {}
    for part in parts:
        for segment, location, block_hashes in zip(part.segments, part.locations, part.block_hashes, strict=True):
            segments[segment.name] = segment
            records = shards.setdefault(segment.name, [])
            if segment.nbytes:
                records.append(make_shard_record(segment, location, block_hashes))
    return tuple(_make_tensor_record(segments[name], shards[name]) for name in sorted(segments))


def make_shard_record(segment: Segment, location: SegmentLocation, block_hashes: str) -> ShardRecord:
    return ShardRecord(
        file=location.file,
        offset=location.offset,
        nbytes=segment.nbytes,
        start=segment.start,
        shape=segment.chunk_shape,
        blocks=block_hashes,
        checksum=checksums.shard_checksum(block_hashes),
    )


def _make_tensor_record(segment: Segment, shards: Sequence[ShardRecord]) -> TensorRecord:
    expected_bytes = segment.itemsize
    for n in segment.shape:
        expected_bytes *= n
    held_bytes = sum(s.nbytes for s in shards)
    if held_bytes != expected_bytes or len({s.start for s in shards}) != len(shards):
        raise CheckpointError(
            f"{segment.name}: the ranks hold {held_bytes} of {expected_bytes} bytes; is it the same on all ranks?"
        )
    return TensorRecord(
        name=segment.name,
        kind=segment.kind,
        dtype=segment.dtype,
        itemsize=segment.itemsize,
        shape=segment.shape,
        shards=tuple(sorted(shards, key=lambda s: s.start)),
    )

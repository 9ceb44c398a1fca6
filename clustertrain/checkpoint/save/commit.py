"""Write one rank's part of a checkpoint, and commit what all ranks have written.

The ranks' writers know nothing of each other but the folder. Each leaves a file ``.rank-<r>.done`` when its part is
durable; rank 0's waits for all of them, writes the index, the marker last, and gives the folder its name.
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
from clustertrain.checkpoint.core.retention import Policy
from clustertrain.checkpoint.format import checksums, fence
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import TakenOver
from clustertrain.checkpoint.format.manifest import Manifest, Metric, Reason, ShardRecord, TensorRecord
from clustertrain.checkpoint.format.staged_segments import Place, Segment
from clustertrain.checkpoint.format.storage_errors import StorageError, patiently
from clustertrain.checkpoint.save.engines import Engine, engine
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank's part. ``memory`` says in which staging buffer it lies; None: no more, but in ``local``, a folder on the
    node's own disk (where there is one). ``own`` are the JSON values of this rank."""

    step: int
    folder: str
    rank: int
    engine: str
    memory: int | None
    segments: list[Segment]
    own: Any
    local: str = ""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """For rank 0: make what all ranks write into ``folder`` the checkpoint of ``step`` in ``root``, and delete what
    ``policy`` does not keep, as far as ``fence`` allows.
    ``patience_s`` is for the slowest rank, from when this one has written."""

    step: int
    folder: str
    root: str
    engine: str
    world_size: int
    torch: str
    layout: dict[str, Any]
    values: dict[str, Any]
    reason: Reason
    metric: Metric | None
    about: dict[str, Any]
    policy: Policy
    patience_s: float
    fence: fence.Fence | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has written, as its done-file says."""

    segments: list[Segment]
    places: list[Place]
    blocks: list[str]
    own: Any


class Abandoned(CheckpointError):
    """Somebody said to give up, since another rank could not write its part."""


def done_file(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.done"


def write(job: Write, memory: memoryview) -> int:
    """Write a part and its done-file; returns its bytes.

    Raises:
        OSError: the disk is full, the quota is spent, …
    """
    folder = Path(job.folder)
    if not handed_in(job):
        part = put(folder, job, memory)
        fault_points.reached("written", job.rank)
        leave(folder, job.rank, part)
        fault_points.reached("handed in", job.rank)
    return sum(s.nbytes for s in job.segments)


def handed_in(job: Write) -> bool:
    """Whether a writer that was killed since has left the done-file of this part. Rank 0 may be reading the part by
    now, or have committed it, so it is not touched again."""
    folder = Path(job.folder)
    if folder.exists():
        if not done_file(folder, job.rank).exists():
            return False
        fsio.fsync_folder(folder)
        return True
    return is_of(index.step_folder(folder.parent, job.step), folder)


def is_of(final: Path, staging: Path) -> bool:
    """Whether the committed checkpoint ``final`` is the one that was made in ``staging``."""
    return index.is_committed(final) and index.read_manifest(final).made_in == staging.name


def put(folder: Path, job: Write, memory: memoryview) -> Part:
    """Write a part into ``folder``. The checksums are those of the staged bytes, computed while they are written.

    Raises:
        OSError: as :func:`write`.
    """
    if any(s.at + s.nbytes > len(memory) for s in job.segments):
        raise CheckpointError(f"{folder}: the part is larger than the memory that it should be in")
    blocks: list[str] = []
    failed: list[BaseException] = []

    def hash_all() -> None:
        try:
            blocks.extend(checksums.block_checksums(memory[s.at : s.at + s.nbytes]) for s in job.segments)
        except BaseException as e:  # raised again below, by the thread that waits for this one
            failed.append(e)

    beside = threading.Thread(target=hash_all)
    beside.start()
    try:
        by = engine(job.engine)
        clear(folder, by, job.rank)
        fault_points.reached("before writing", job.rank)
        places = by.write(folder, job.rank, job.segments, memory)
    finally:
        beside.join()
    if failed:
        raise failed[0]
    return Part(segments=job.segments, places=places, blocks=blocks, own=job.own)


def leave(folder: Path, rank: int, part: Part) -> None:
    """Write the done-file of a part that is durable."""
    fsio.write_bytes(done_file(folder, rank), msgspec.json.encode(part))


def files_of(folder: Path, by: Engine, rank: int) -> list[Path]:
    """The files and folders in ``folder`` that ``rank`` has written."""
    return [path for pattern in by.patterns for path in sorted(folder.glob(pattern.format(rank=rank)))]


def clear(folder: Path, by: Engine, rank: int) -> None:
    """Remove what a writer that was killed has left of the same part."""
    for path in files_of(folder, by, rank):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def commit(
    job: Commit, go_on: Callable[[], bool], may_prune: Callable[[], bool], spared: Callable[[], Collection[int]] = tuple
) -> int:
    """Wait for all parts and commit; returns the bytes of the checkpoint's files. Done a second time, after the process
    that did it first was killed, it goes on from where that one was.

    Args:
        go_on: whether there is still somebody who wants it.
        may_prune: whether older checkpoints may be deleted; not when another attempt may be reading them.
        spared: the steps that are needed all the same.

    Raises:
        OSError: as :func:`write`.
        TakenOver: a newer attempt owns the run.
        CheckpointError: a rank did not write its part, or the parts do not fit together.
    """
    folder, final = Path(job.folder), index.step_folder(Path(job.root), job.step)
    if not folder.exists() and is_of(final, folder):
        fsio.fsync_folder(final.parent)
        return index.read_manifest(final).bytes
    try:
        manifest = index.read_manifest(folder) if index.is_committed(folder) else _indexed(folder, job, go_on)
        for rank in range(job.world_size):
            done_file(folder, rank).unlink(missing_ok=True)
        fault_points.reached("before the fence", 0)
        # As late as can be, and after the folder was made: a newer attempt that claims the run after this finds the
        # folder and takes it away, or finds the checkpoint and goes on from it.
        fence.check(job.fence)
        fault_points.reached("after the fence", 0)
        publish(folder, final)
    except BaseException as e:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(e, (OSError, CheckpointError)):
            fence.check(job.fence)  # a newer attempt may have taken the folder away
        raise
    if may_prune():
        _retire(job, spared())
    return manifest.bytes


def _indexed(folder: Path, job: Commit, go_on: Callable[[], bool]) -> Manifest:
    """Write the index of all parts, and the marker."""
    parts = _all_parts(folder, job, go_on)
    for half in set(folder.glob(".*")) - {done_file(folder, r) for r in range(job.world_size)}:
        half.unlink()  # of a writer that was killed, and of no use now that all parts are there
    tensors = merge(parts)
    engine(job.engine).finish(folder, tensors)
    manifest = Manifest(
        format=index.FORMAT,
        torch=job.torch,
        step=job.step,
        made_in=folder.name,
        world_size=job.world_size,
        engine=job.engine,
        reason=job.reason,
        metric=job.metric,
        about=job.about,
        layout=job.layout,
        files=_files(folder, job.world_size),
        tensors=tensors,
        values={**job.values, "ranks": {str(r): part.own for r, part in enumerate(parts)}},
    )
    index.check(folder, manifest)  # what the parts say is there must be there
    fault_points.reached("before the marker", 0)
    index.write_manifest(folder, manifest)
    fault_points.reached("after the marker", 0)
    return manifest


def _all_parts(folder: Path, job: Commit, go_on: Callable[[], bool]) -> list[Part]:
    parts: dict[int, Part] = {}

    def look() -> bool:
        # By listing: a client of NFS that has asked for a file in vain believes for a minute that there is none.
        there = {p.name for p in patiently(lambda: list(folder.iterdir()), folder)}
        for rank in range(job.world_size):
            path = done_file(folder, rank)
            if rank not in parts and path.name in there:
                with suppress(FileNotFoundError, msgspec.DecodeError):  # not all there yet
                    parts[rank] = schema.decode(patiently(path.read_bytes, path), Part)
        return len(parts) == job.world_size or not go_on()

    clock.wait_until(look, job.patience_s, 0.05)
    if not go_on() and len(parts) < job.world_size:
        raise Abandoned("given up")
    if len(parts) < job.world_size:
        missing = next(r for r in range(job.world_size) if r not in parts)
        raise StorageError(f"rank {missing} had not written its part {job.patience_s:g} s after rank 0 had")
    return [parts[r] for r in range(job.world_size)]


def _files(folder: Path, ranks: int) -> dict[str, int]:
    done = {done_file(folder, r) for r in range(ranks)}
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p not in done)
    return {str(p.relative_to(folder)): p.stat().st_size for p in files}


def publish(staging: Path, final: Path) -> None:
    """Give a complete checkpoint its name. What it replaces goes last; the sweep before a restore brings it back after
    a kill in between."""
    old = index.replaced_folder(final)
    if final.exists():
        final.rename(old)
    try:
        fault_points.reached("while publishing", 0)
        staging.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    fsio.fsync_folder(final.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)  # else the sweep of the next restore does it


def _retire(job: Commit, spared: Collection[int]) -> None:
    root = Path(job.root)
    try:
        fault_points.reached("while pruning", 0)
        # Without reading all bytes again: that would take as long as a restore, at every save.
        retention.apply(root, job.policy, good=retention.looks_whole, spared=spared, fence=job.fence)
    except TakenOver as e:
        log.warning("%s: old checkpoints in %s are left to it", e, root)
    except (OSError, StorageError) as e:
        # The new checkpoint is committed; an old one that cannot be deleted is no reason to end the run.
        log.warning("old checkpoints in %s could not be deleted: %s", root, e)


def merge(parts: Iterable[Part]) -> tuple[TensorRecord, ...]:
    """What all ranks have written, as one record a logical tensor.

    Raises:
        CheckpointError: the shards of a tensor do not add up to it (a rank holds other state than the rest).
    """
    heads: dict[str, Segment] = {}
    shards: dict[str, list[ShardRecord]] = {}
    for part in parts:
        for segment, place, blocks in zip(part.segments, part.places, part.blocks, strict=True):
            heads[segment.name] = segment
            found = shards.setdefault(segment.name, [])
            if segment.nbytes:
                found.append(shard(segment, place, blocks))
    return tuple(_tensor(heads[name], shards[name]) for name in sorted(heads))


def shard(segment: Segment, place: Place, blocks: str) -> ShardRecord:
    return ShardRecord(
        file=place.file,
        offset=place.offset,
        nbytes=segment.nbytes,
        start=segment.start,
        shape=segment.part,
        blocks=blocks,
        checksum=checksums.over(blocks),
    )


def _tensor(head: Segment, shards: Sequence[ShardRecord]) -> TensorRecord:
    whole = head.itemsize
    for n in head.shape:
        whole *= n
    held = sum(s.nbytes for s in shards)
    if held != whole or len({s.start for s in shards}) != len(shards):
        raise CheckpointError(f"{head.name}: the ranks hold {held} bytes of {whole}; is it the same on all of them?")
    return TensorRecord(
        name=head.name,
        kind=head.kind,
        dtype=head.dtype,
        itemsize=head.itemsize,
        shape=head.shape,
        shards=tuple(sorted(shards, key=lambda s: s.start)),
    )

"""The torch.distributed.checkpoint (DCP) engine, whose checkpoints torch's own tools can read.

These tools are ``torch.distributed.checkpoint.load``, ``dcp_to_torch_save`` and others. Only DCP's writer is used, not
its planner, which needs a process group. Each rank writes one file with a torch.save archive per segment, and a second
file with the offsets of the archives. From the second files ``finish`` builds ``.metadata``. They stay, so that
``finish`` can be repeated after a kill.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from clustertrain import fsio
from clustertrain.checkpoint.format.manifest import TensorRecord
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation
from clustertrain.checkpoint.save.engines import library
from clustertrain.errors import CheckpointError

METADATA = ".metadata"
_ARCHIVES_SUFFIX = ".archives.json"  # added to the name of a data file

# The local file header of a zip archive. The two numbers are the lengths of the name and of the extra field after it.
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class DcpEngine:
    name = "dcp"
    patterns = ("__{rank}_*", ".__{rank}_*")
    frozen_pattern = ""

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[SegmentLocation]:
        writer = _make_storage_writer(folder)
        # Without collectives, DCP names the file after the rank.
        writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
        items = [_make_write_item(n, s) for n, s in enumerate(segments) if s.nbytes]
        with _raise_os_error_cause():
            results = writer.write_data(
                writer.prepare_local_plan(SavePlan(items)), _StagedPlanner(segments, memory)
            ).wait()

        name = f"__{rank}_0.distcp"
        locations = [SegmentLocation(file=name, offset=0)] * len(segments)
        archives = {}
        with (folder / name).open("rb") as file:
            for result in results:
                n, archive = cast(int, result.index.index), result.storage_data
                locations[n] = SegmentLocation(file=name, offset=_find_data_offset(file, archive, segments[n]))
                archives[locations[n].offset] = (archive.offset, archive.length)
        library.fsync_and_verify(folder, segments, locations, memory)
        fsio.write_json(folder / (name + _ARCHIVES_SUFFIX), archives)
        return locations

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        files = sorted({shard.file for tensor in tensors for shard in tensor.shards})
        archives = {name: _read_archive_spans(folder, name) for name in files}
        results = [
            WriteResult(
                index=MetadataIndex(tensor.name, shard.start, n),
                size_in_bytes=shard.nbytes,
                storage_data=_StorageInfo(shard.file, *archives[shard.file][str(shard.offset)]),
            )
            for tensor in tensors
            for n, shard in enumerate(tensor.shards)
        ]
        metadata = Metadata(
            state_dict_metadata={tensor.name: _make_tensor_metadata(tensor) for tensor in tensors},
            planner_data={tensor.name: (tensor.name,) for tensor in tensors},  # the path in a flat state_dict
        )
        _make_storage_writer(folder).finish(metadata, [results])
        with (folder / METADATA).open("rb") as file:
            os.fsync(file.fileno())
        fsio.fsync_folder(folder)


class _ExclusiveFileSystem(FileSystem):
    """A file system that never writes data into an existing file, but may replace an index of a killed process."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        mode = "xb" if Path(path).suffix == ".distcp" else mode
        with open(path, mode, opener=lambda p, flags: os.open(p, flags, 0o640)) as stream:
            yield cast(io.IOBase, stream)


class _FileWindow(io.RawIOBase):
    """A file object for the ``length`` bytes of a file that begin at ``start``."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._pos = fd, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._pos = offset + (0, self._pos, self._length)[whence]
        return self._pos

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._pos)]
        nread = os.preadv(self._fd, [view], self._start + self._pos)
        self._pos += nread
        return nread


class _StagedPlanner(DefaultSavePlanner):
    """A planner that passes the staged tensors to the writer, which uses nothing else of a planner."""

    def __init__(self, segments: Sequence[Segment], memory: memoryview) -> None:
        super().__init__()
        self._segments, self._memory = segments, memory

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        segment = self._segments[cast(int, index.index)]
        data = library.bytes_to_tensor(library.segment_bytes(segment, self._memory))
        return data.view(_dcp_dtype(segment.dtype)).reshape(segment.chunk_shape)


def _make_storage_writer(folder: Path) -> FileSystemWriter:
    # One thread: two are not faster, and errors in the second one are lost. No copying ahead: it is meant for tensors
    # on a device, and would initialize CUDA. DCP calls fsync before it flushes (torch 2.13), so the engine syncs later.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0, sync_files=False)
    writer.fs = _ExclusiveFileSystem()
    return writer


def _dcp_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    if re.fullmatch("u?int[1-7]|bits.*", name):  # torch.save lacks the former, DCP the latter (torch 2.13)
        return {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    return dtype


def _make_write_item(n: int, segment: Segment) -> WriteItem:
    return WriteItem(
        # DCP returns the number with the result.
        index=MetadataIndex(segment.name, segment.start, n),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(segment.start), torch.Size(segment.chunk_shape)),
            properties=TensorProperties(_dcp_dtype(segment.dtype)),
            size=torch.Size(segment.shape),
        ),
    )


def _make_tensor_metadata(tensor: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(_dcp_dtype(tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[ChunkStorageMetadata(torch.Size(s.start), torch.Size(s.shape)) for s in tensor.shards],
    )


def _find_data_offset(file: IO[bytes], archive: _StorageInfo, segment: Segment) -> int:
    """Return the offset of the segment's bytes in the file.

    Raises:
        CheckpointError: the archive does not contain them unchanged.
    """
    try:
        with zipfile.ZipFile(cast(IO[bytes], _FileWindow(file.fileno(), archive.offset, archive.length))) as unzipped:
            members = [i for i in unzipped.infolist() if i.filename.endswith("/data/0")]
    except zipfile.BadZipFile:
        members = []
    if [(i.file_size, i.compress_type) for i in members] != [(segment.nbytes, zipfile.ZIP_STORED)]:
        raise CheckpointError(
            f"{segment.name}: torch {torch.__version__} does not save the bytes of a tensor contiguously and unchanged",
            fix='use engine = "raw"',
        )
    header = archive.offset + members[0].header_offset
    _, name, extra = _LOCAL_HEADER.unpack(os.pread(file.fileno(), _LOCAL_HEADER.size, header))
    return header + _LOCAL_HEADER.size + int(name) + int(extra)


def _read_archive_spans(folder: Path, name: str) -> dict[str, tuple[int, int]]:
    """Return (offset, length) of each archive in the data file ``name``, by the offset of its segment."""
    spans: dict[str, tuple[int, int]] | None = fsio.read_json(folder / (name + _ARCHIVES_SUFFIX))
    if spans is None:
        raise CheckpointError(f"{folder / name}: {name}{_ARCHIVES_SUFFIX}, written by the same rank, is missing")
    return spans


@contextmanager
def _raise_os_error_cause() -> Generator[None, None, None]:
    """Raise the OSError behind a RuntimeError of torch.save, whose message about file positions hides a full disk."""
    try:
        yield
    except RuntimeError as e:
        cause: BaseException | None = e
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from e


def make() -> DcpEngine:
    return DcpEngine()

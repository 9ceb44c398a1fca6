"""The manifest of a checkpoint, and the layout of its files.

checkpoints/step-00000500/
  rank-0.bin rank-1.bin …   shards as raw bytes in C order (other engines have other files)
  rank-0.frozen-0.bin …     shards that are not trained; may be hard links to the files of an earlier checkpoint
  manifest.json             the location and checksums of each shard
  COMMITTED                 checksum of the manifest; the last file written
checkpoints/.step-00000500-<attempt>-<token>  a pending save, or the remains of a killed one; never read, even with its
                          marker: the rename to step-00000500 commits the checkpoint
checkpoints/.old-step-00000500                the checkpoint that a save of the same step is replacing
"""

from __future__ import annotations

import math
import re
import stat
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from clustertrain import fsio, schema
from clustertrain.checkpoint.format import manifest_checks
from clustertrain.checkpoint.format.checksums import checksum, has_all_checksums
from clustertrain.checkpoint.format.storage import F, Folder, RemoteFolder, join_path
from clustertrain.checkpoint.format.storage_errors import with_retries
from clustertrain.errors import CheckpointError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"

_MAX_MARKER_BYTES, _MAX_MANIFEST_BYTES = 1 << 20, 4 << 30  # larger files are not read
T = TypeVar("T")

_FOLDER_NAME = re.compile(r"(damaged-)?step-(\d{8,})")

TensorKind = Literal["model", "optimizer", "other"]
# "stop": saved because the job was ending. "best": saved only because of its metric.
SaveReason = Literal["interval", "best", "stop", "end"]


class DamagedCheckpoint(CheckpointError):
    """A file of a committed checkpoint is missing, truncated or altered; an older checkpoint may be intact."""


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # gc: many, and no cycles
    """A shard of a tensor."""

    file: str
    """Name of the file, relative to the checkpoint's folder."""
    offset: int
    """First byte of the shard in the file."""
    nbytes: int
    start: tuple[int, ...]
    """Offsets of the shard in the tensor, one per dimension."""
    shape: tuple[int, ...]
    blocks: str
    """Checksums of the blocks; see :mod:`~clustertrain.checkpoint.format.checksums`. Empty in a file that another
    program wrote, whose bytes cannot be verified."""
    checksum: str
    """Checksum of the shard."""


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # gc: many, and no cycles
    """A logical (global) tensor."""

    name: str
    kind: TensorKind
    dtype: str
    """The name in torch, without "torch."."""
    itemsize: int
    """Bytes per element."""
    shape: tuple[int, ...]
    shards: tuple[ShardRecord, ...]


class CheckpointMetric(msgspec.Struct, frozen=True, kw_only=True):
    """The metric that decides which checkpoints are best."""

    name: str
    value: float | None
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is best."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``manifest.json``."""

    format: int
    """:data:`FORMAT_VERSION` of the version that saved the checkpoint."""
    torch: str
    """Version of torch."""
    step: int
    made_in: str = ""
    """Name of the staging folder, unique per save."""
    world_size: int
    engine: str
    reason: SaveReason = "interval"
    metric: CheckpointMetric | None = None
    about: dict[str, Any] = {}
    """What produced the checkpoint: versions, recipe, data."""
    layout: dict[str, Any]
    files: dict[str, int]
    """Sizes in bytes by file name."""
    linked: tuple[str, ...] = ()
    """Names of the files that are links to files of an earlier checkpoint; this save did not write them."""
    tensors: tuple[TensorRecord, ...]
    values: dict[str, Any]
    """The state except tensors, encoded by :mod:`~clustertrain.checkpoint.core.json_tree`."""

    @property
    def bytes(self) -> int:
        """Size of all data files."""
        return sum(self.files.values())

    @property
    def written_bytes(self) -> int:
        """Size of the data files that this save wrote."""
        return self.bytes - sum(self.files[name] for name in {*self.linked} & self.files.keys())


class CommitMarker(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``COMMITTED``."""

    format: int
    step: int
    manifest_xxh3_128: str


def step_folder(root: F, step: int) -> F:
    return join_path(root, f"step-{step:08d}")


def staging_folder(root: Path, step: int, attempt: str) -> Path:
    return root / f".step-{step:08d}-{attempt}"


def replaced_folder(final: Path) -> Path:
    return final.with_name(f".old-{final.name}")


def damaged_folder(folder: Path) -> Path:
    return folder.with_name(f"damaged-{folder.name}")


def parse_step(folder: Folder) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other name."""
    match = _FOLDER_NAME.fullmatch(folder.name)
    return int(match[2]) if match else None


def _list_by_step(root: F, prefix: str) -> list[F]:
    try:
        # Not glob, which treats an unreadable folder as empty: the run would start over.
        names = with_retries(lambda: [p.name for p in root.iterdir()], root)
    except OSError:
        return []
    matches = [(step, n) for n in names if n.startswith(prefix) and (step := parse_step(root / n)) is not None]
    return [join_path(root, n) for _, n in sorted(matches)]


def list_checkpoint_folders(root: F) -> list[F]:
    """Return the checkpoint folders, committed or not, oldest step first."""
    return _list_by_step(root, "step-")


def list_damaged_folders(root: Path) -> list[Path]:
    """Return the checkpoints that a restore set aside as damaged, oldest step first."""
    return _list_by_step(root, "damaged-step-")


def has_commit_marker(folder: Folder) -> bool:
    """Return whether all files were written; a checkpoint is committed if its folder also has its final name."""
    try:
        return stat.S_ISREG(with_retries((folder / COMMITTED).stat, folder / COMMITTED).st_mode)
    except OSError:
        return False


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, make the folder durable, then write the commit marker."""
    data = msgspec.json.encode(manifest)
    fsio.write_bytes(folder / MANIFEST, data)
    marker = CommitMarker(format=FORMAT_VERSION, step=manifest.step, manifest_xxh3_128=checksum(data))
    fsio.write_bytes(folder / COMMITTED, msgspec.json.encode(marker) + b"\n")


def read_manifest(folder: Folder) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Raises:
        DamagedCheckpoint: there is no marker, or manifest, marker and folder name do not match.
        StorageError: the file system failed.
        CheckpointError: the checkpoint has another format version.
    """
    marker = _decode(folder / COMMITTED, _read_file(folder / COMMITTED, _MAX_MARKER_BYTES), CommitMarker)
    data = _read_file(folder / MANIFEST, _MAX_MANIFEST_BYTES)
    if marker.format != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: written in format {marker.format}, but this version of clustertrain reads format "
            f"{FORMAT_VERSION}",
            fix="use the version that wrote it" + (", or a newer one" if marker.format > FORMAT_VERSION else ""),
        )
    if parse_step(folder) not in (None, marker.step):  # a renamed copy, whose data would count as another step's
        raise DamagedCheckpoint(f"{folder}: contains the checkpoint of step {marker.step}")
    if checksum(data) != marker.manifest_xxh3_128:
        raise DamagedCheckpoint(f"{folder / MANIFEST}: checksum differs from the one in {COMMITTED}")
    manifest = _decode(folder / MANIFEST, data, Manifest)
    if manifest.step != marker.step:
        raise DamagedCheckpoint(
            f"{folder / MANIFEST}: describes step {manifest.step}, but {COMMITTED} says step {marker.step}"
        )
    check_manifest(folder, manifest)
    return manifest


def _read_file(path: Folder, max_bytes: int) -> bytes:
    """Read a file that others may have written. Refuse a pipe, which could block, and a file that is too large."""
    try:
        if isinstance(path, Path):
            file_stat = with_retries(path.stat, path)
            if not stat.S_ISREG(file_stat.st_mode) or file_stat.st_size > max_bytes:
                raise DamagedCheckpoint(f"{path}: is not a regular file of at most {max_bytes >> 20} MiB")
        return with_retries(path.read_bytes, path)
    except OSError as e:
        raise DamagedCheckpoint(f"{path.parent}: {path.name} is missing") from e


def _decode(path: Folder, data: bytes, struct_type: type[T]) -> T:
    try:
        return schema.decode(data, struct_type)
    except msgspec.MsgspecError as e:
        raise DamagedCheckpoint(f"{path}: cannot be read: {e}") from e


def check_manifest(folder: Folder, manifest: Manifest) -> None:
    """Check that a manifest is consistent, has complete tensors, and names only files in its folder.

    A matching checksum does not ensure this.

    Raises:
        DamagedCheckpoint: the manifest is inconsistent.
    """
    path = folder / MANIFEST
    for name, size in manifest.files.items():
        if problem := manifest_checks.find_name_error(name):
            raise DamagedCheckpoint(f"{path}: names {name!r}, which {problem}")
        if size < 0:
            raise DamagedCheckpoint(f"{path}: {name} has {size} bytes")
    names = {t.name for t in manifest.tensors}
    if len(names) != len(manifest.tensors):
        raise DamagedCheckpoint(f"{path}: names a tensor twice")
    for tensor in manifest.tensors:
        for shard in tensor.shards:
            _check_shard(folder, manifest, tensor, shard)
        problem = manifest_checks.find_form_error(
            tensor.dtype, tensor.itemsize, tensor.shape
        ) or manifest_checks.find_tiling_error(tensor.shape, [(s.start, s.shape) for s in tensor.shards])
        if problem:
            raise DamagedCheckpoint(f"{path}: {tensor.name} {problem}")
    if problem := manifest_checks.find_values_error(manifest.values, names):
        raise DamagedCheckpoint(f"{path}: {problem}")


def _check_shard(folder: Folder, manifest: Manifest, tensor: TensorRecord, shard: ShardRecord) -> None:
    if problem := manifest_checks.find_name_error(shard.file):
        raise DamagedCheckpoint(f"{folder / MANIFEST}: names {shard.file!r}, which {problem}")
    if shard.offset + shard.nbytes > manifest.files.get(shard.file, -1):
        raise DamagedCheckpoint(f"{folder / shard.file}: is too short for the bytes of {tensor.name}")
    size = math.prod(shard.shape) * tensor.itemsize
    has_negative = min((*shard.start, *shard.shape, shard.offset, tensor.itemsize)) < 0
    if has_negative or shard.nbytes != size or not has_all_checksums(shard.blocks, size):
        raise DamagedCheckpoint(f"{folder / MANIFEST}: the size of a shard of {tensor.name} does not match its shape")


def check_sizes(folder: Folder, manifest: Manifest) -> None:
    """Check that every data file exists and has the size that was written: the cheap part of verification.

    Raises:
        DamagedCheckpoint: a file has another size; the message names the first one.
        StorageError: the file system failed.
    """
    for problem in find_wrong_sizes(folder, manifest).values():
        raise DamagedCheckpoint(problem)


def find_wrong_sizes(folder: Folder, manifest: Manifest) -> dict[str, str]:
    """Return, by file name, the message for each file with a wrong size.

    Raises:
        StorageError: the file system failed.
    """
    remote_sizes = with_retries(folder.sizes, folder) if isinstance(folder, RemoteFolder) else None
    problems = {}
    for name, size in manifest.files.items():
        path = folder / name
        try:
            actual = _regular_size(path) if remote_sizes is None else remote_sizes.get(name)
        except OSError as e:
            problems[name] = f"{path}: {e.strerror or e}"
            continue
        if actual is None:
            problems[name] = f"{path}: is missing or not a regular file"
        elif actual != size:
            problems[name] = f"{path}: has {actual} bytes, but {size} were written"
    return problems


def _regular_size(path: Folder) -> int | None:
    """Return the size of a regular file, None for anything else."""
    file_stat = with_retries(path.stat, path)
    return file_stat.st_size if stat.S_ISREG(file_stat.st_mode) else None

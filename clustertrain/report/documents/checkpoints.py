"""Documents about checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from clustertrain import schema
from clustertrain.checkpoint.offline.diff import CheckpointDiff


class CheckpointMetric(msgspec.Struct, frozen=True, kw_only=True):
    """The deciding metric of a checkpoint."""

    name: str
    """Name of the metric, such as `validation_loss`."""
    value: float
    """Its value at this step."""


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. Values that a damaged index does not reveal are null."""

    step: int | None
    """Optimizer steps completed when it was saved; null if the name of the folder does not say it."""
    path: str
    """Folder or URL of the checkpoint."""
    bytes: int
    """Size of its files, bytes."""
    new_bytes: int | None
    """Size of those files that no older checkpoint shares, bytes; null for a single checkpoint."""
    committed: bool
    """It was saved completely; an uncommitted one is never restored."""
    verified: bool | None
    """True if every byte was read and its checksum matches, false if it is damaged, null if neither is known."""
    damage: str | None = None
    """What is damaged; null if nothing is known to be."""
    unreadable: str | None = None
    """The error of the file system or the storage; null without one."""
    engine: str | None
    """How it was written: `raw` or another value of `checkpoint.engine`; null if it is not committed."""
    layout: dict[str, Any] | None
    """The layout that saved it."""
    world_size: int | None
    """Number of ranks that saved it."""
    metric: CheckpointMetric | None
    """The deciding metric when it was saved; null without a finite value."""
    best: bool
    """It has the best metric of the run's checkpoints."""


class CheckpointList(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of a run or folder, oldest first."""

    run: str
    """Id of the run, or the folder."""
    checkpoints: tuple[CheckpointEntry, ...]
    """One entry per checkpoint."""
    record_error: str | None = None
    """Why the record of rollbacks cannot be read; the checkpoints that it invalidates are then in the list. Null if it
    can be read."""


class VerifiedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The verification of one checkpoint."""

    step: int | None
    """Optimizer steps completed when it was saved; null if the name of the folder does not say it."""
    path: str
    """Folder or URL of the checkpoint."""
    verified: bool | None
    """True if every checksum matches, false if the checkpoint is damaged, null if it cannot be read."""
    damage: str | None = None
    """What is damaged; null if nothing is."""
    unreadable: str | None = None
    """Why it cannot be read; null if it can."""


class VerifiedCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints that were read."""

    run: str
    """Id of the run, or the folder."""
    checkpoints: tuple[VerifiedCheckpoint, ...]
    """One entry per checkpoint, oldest first."""
    record_error: str | None = None
    """Why the record of rollbacks cannot be read; the checkpoints that it invalidates are then verified too. Null if it
    can be read."""


class CheckpointDigest(msgspec.Struct, frozen=True, kw_only=True):
    """A hash of tensors, independent of the layout that saved them."""

    run: str
    """Id of the run, or the folder."""
    step: int | None
    """Step of the checkpoint; null if the name of its folder does not say it."""
    contents: str
    """The hashed tensors: `model`, `optimizer` or `all`."""
    digest: str
    """Hash (XXH3, 128 bits, hexadecimal) of names, dtypes, shapes and bytes: equal for equal tensors."""


class ComparedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison."""

    run: str
    """Id of the run, or the folder."""
    step: int | None
    """Step of the checkpoint; null if the name of its folder does not say it."""
    path: str
    """Folder or URL of the checkpoint."""


class CheckpointComparison(CheckpointDiff, frozen=True, kw_only=True):
    """The comparison of the checkpoints A and B."""

    a: ComparedCheckpoint
    """The first checkpoint."""
    b: ComparedCheckpoint
    """The second checkpoint."""


class CheckpointExport(msgspec.Struct, frozen=True, kw_only=True):
    """A finished export."""

    run: str
    """Id of the run, or the folder."""
    step: int
    """Step of the checkpoint that was exported."""
    path: str
    """The file or folder that was written."""
    format: str
    """`safetensors` or `torch`."""
    names: str
    """Naming of the tensors: `huggingface` or `own`."""
    files: tuple[str, ...]
    """Names of the files in `path`; empty if `path` is a file."""
    tensors: int
    """Number of tensors."""
    bytes: int
    """Size of the tensors, bytes."""


class PrunedCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints that were deleted."""

    run: str
    """Id of the run, or the folder."""
    deleted: tuple[str, ...] = ()
    """Folders that were deleted."""
    would_delete: tuple[str, ...] = ()
    """With --dry-run: folders that would be deleted."""


def build_list(label: str, rows: Iterable[Mapping[str, Any]], record_error: str | None) -> CheckpointList:
    """Return the document of the rows of :func:`clustertrain.checkpoint.offline.inspect.list_checkpoints`."""
    entries = tuple(schema.convert(dict(row), CheckpointEntry) for row in rows)
    return CheckpointList(run=label, checkpoints=entries, record_error=record_error)

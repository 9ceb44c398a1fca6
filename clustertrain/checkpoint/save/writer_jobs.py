"""The messages between a rank and its writer process: jobs, requests and outcomes.

Both ends run the same version of this package, and no message is kept on disk.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from clustertrain.checkpoint.core.failures import Failure
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import CheckpointMetric, SaveReason
from clustertrain.checkpoint.format.staged_segments import Segment

# -- from the rank to its writer


class WriteJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write one rank's part of a checkpoint."""

    step: int
    folder: str
    """The checkpoint's staging folder in the shared file system."""
    rank: int
    engine: str
    buffer_index: int | None
    """The staging buffer that holds the part; None once the part is only in ``local_folder``."""
    segments: list[Segment]
    rank_values: Any
    """The JSON values of this rank."""
    local_folder: str = ""
    """The folder for the part on the node's own disk; empty without node-local checkpoints."""


class CommitJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Commit the checkpoint that all ranks write into ``folder``, then prune ``root``. Only for rank 0's writer."""

    step: int
    folder: str
    root: str
    """The folder of the run's checkpoints."""
    engine: str
    world_size: int
    torch: str
    layout: dict[str, Any]
    values: dict[str, Any]
    """The JSON values that all ranks share."""
    reason: SaveReason
    metric: CheckpointMetric | None
    about: dict[str, Any]
    policy: RetentionPolicy
    rank_timeout_s: float
    """Seconds to wait for the slowest rank's part, from when this rank's part is written."""
    fence: Fence | None = None


class UploadJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep copies of the checkpoints in ``root`` at ``url``, according to ``policy``."""

    url: str
    root: str
    rank: int
    """Each rank uploads its share of the files."""
    world_size: int
    attempt: str
    policy: RetentionPolicy
    fence: Fence | None = None


class AttachBuffer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Map the staging buffer ``index``; its file descriptor follows this message."""

    index: int
    size: int


class AbortCommit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Abort the commit of ``step``."""

    step: int


WriterMessage = AttachBuffer | WriteJob | CommitJob | AbortCommit | UploadJob

# -- from the writer to its rank

JobKind = Literal["local_write", "write", "commit", "upload"]


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a job, or of one checkpoint's upload."""

    step: int
    kind: JobKind
    """After "local_write" the part is on the node's own disk and its staging buffer is free. An "upload" without bytes,
    seconds and failure means that this rank has nothing left to upload up to ``step``."""
    bytes: int = 0
    written: int = 0
    """Bytes without those that are linked from an earlier checkpoint."""
    seconds: float = 0.0
    ended: float
    """Time by the monotonic clock, which all processes of a machine share."""
    failure: Failure | None = None


def job_kind(job: WriteJob | CommitJob) -> JobKind:
    """Return the kind of outcome of ``job``."""
    return "write" if isinstance(job, WriteJob) else "commit"

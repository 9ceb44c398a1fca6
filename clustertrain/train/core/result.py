"""The rank's result: ``rank-<r>.json`` in the node-local rank folder, which the node agent reads."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from clustertrain import fsio, settings
from clustertrain.checkpoint.format.storage_errors import FULL_ERRNOS, TRANSIENT_ERRNOS, StorageError
from clustertrain.errors import EXIT_CONFIG, EXIT_FAILED, CheckpointError, ClusterTrainError, ConfigError, UsageError
from clustertrain.run.results import ErrorInfo, FailureKind, RankEnding, RankResult
from clustertrain.train.core import disk_full
from clustertrain.train.core.memory import peak_allocated_gib

# gloo and the CPU allocator raise plain RuntimeErrors with these messages.
_COMMUNICATION_MESSAGES = ("gloo", "connection closed by peer", "connection reset by peer", "nccl")
# A dead peer closes its connection; only the timeout detects a peer that never joins a collective.
_HANG_MESSAGES = ("timed out waiting", "collective operation timeout")
_MEMORY_MESSAGES = ("can't allocate memory", "cannot allocate memory", "out of memory")


def classify_failure(error: BaseException) -> FailureKind:
    """Return the kind of failure, which determines whether a requeue makes sense.

    After ``environment`` (an unusable recipe, machine or set of checkpoints, or a full disk), a requeue would fail the
    same way, so the exit code is 78. After ``storage`` (a file system that did not respond), a requeue may succeed.
    """
    message = str(error).lower()
    if isinstance(error, StorageError):
        return "environment" if error.full else "storage"
    if isinstance(error, (ConfigError, CheckpointError)):
        return "environment"
    if isinstance(error, OSError) and error.errno in FULL_ERRNOS | TRANSIENT_ERRNOS:
        return "environment" if error.errno in FULL_ERRNOS else "storage"
    if disk_full.is_disk_full(error):
        return "environment"
    if disk_full.is_failed_write(error):
        return "storage"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out_of_memory"
    if isinstance(error, RuntimeError) and any(phrase in message for phrase in _HANG_MESSAGES):
        return "hang"
    if isinstance(error, dist.DistError):
        return "communication"
    if isinstance(error, torch.AcceleratorError):
        return "device"  # an ECC error, an illegal access or a lost GPU; the script is not always the cause
    if isinstance(error, RuntimeError):
        if any(phrase in message for phrase in _MEMORY_MESSAGES):
            return "out_of_memory"
        if any(phrase in message for phrase in _COMMUNICATION_MESSAGES):
            return "communication"
    return "error"


def is_killed_dataloader_worker(error: BaseException) -> bool:
    """Return whether a signal killed a worker process of a DataLoader."""
    return isinstance(error, RuntimeError) and "dataloader worker (pid" in str(error).lower()


class RankResultWriter:
    """Collector and writer of this rank's result. Without a rank folder, it writes nothing."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        folder = environ.get(settings.RANK_DIR)
        self._rank = int(environ.get("RANK", "0"))
        self._local_rank = int(environ.get("LOCAL_RANK", "0"))
        self._path = Path(folder) / f"rank-{self._rank}.json" if folder else None
        self._session_closed_path = Path(folder) / f"finished-{self._rank}.json" if folder else None
        self._deferred = False
        self._last_total = -1
        self.ending: RankEnding | None = None
        self.finished = False  # the latest step loop has done all its steps
        self.step = 0
        self.committed_step: int | None = None
        self.reason: str | None = None  # of the ending, if it is not obvious
        self.budget_spent = False  # the run's budget is spent, so a requeue is useless
        self.device = torch.device("cpu")

    def defer_completion(self) -> None:
        """Leave :meth:`record_completed` to the caller, which calls it after the script; sessions then do not."""
        self._deferred = True

    def begin_loop(self, total: int) -> None:
        """Record the start of a step loop that ends at step ``total`` of the run.

        Raises:
            UsageError: an earlier loop, in this session or another one, ends at this step or later.
        """
        if total <= self._last_total:
            raise UsageError(
                f"session.steps(total={total}): an earlier loop ends at step {self._last_total}, and the step numbers"
                " of a run continue",
                fix=f"use total={self._last_total + total} for {total} more steps, or submit them as a separate run",
            )
        self._last_total = total
        self.finished = False
        if self._session_closed_path is not None:
            self._session_closed_path.unlink(missing_ok=True)

    def record_session_closed(self) -> None:
        """Record that the session closed without an error.

        The agent kills a rank that keeps running after its record. With :meth:`defer_completion`, the script may still
        have work to do, so only ``finished-<r>.json`` is written. It shows that all steps are done if the process
        never writes its record.
        """
        if self._deferred:
            self.ending = "completed"
            if self._session_closed_path is not None and self.finished:
                fsio.write_json(self._session_closed_path, msgspec.to_builtins(self._build_record("completed")))
        else:
            self.record_completed()

    def record_completed(self) -> None:
        self._write("completed")

    def record_stopped(self) -> None:
        self._write("stopped")

    def record_failure(self, error: BaseException) -> int:
        """Record ``error`` and return the exit code for it."""
        kind = classify_failure(error)
        code = EXIT_CONFIG if kind == "environment" else EXIT_FAILED
        message_lines = [str(error), *getattr(error, "__notes__", ())]
        if not isinstance(error, ClusterTrainError) and (advice := disk_full.format_advice(error)):
            message_lines.append(advice)
        error_info = ErrorInfo(
            type=type(error).__name__,
            message="\n".join(message_lines),
            traceback="".join(traceback.format_exception(error))[-16_384:],
        )
        self._write("failed", exit_code=code, kind=kind, error=error_info)
        return code

    def _write(
        self, ending: RankEnding, exit_code: int = 0, kind: FailureKind | None = None, error: ErrorInfo | None = None
    ) -> None:
        self.ending = ending
        if self._path is not None:
            record = msgspec.structs.replace(self._build_record(ending), exit_code=exit_code, kind=kind, error=error)
            fsio.write_json(self._path, msgspec.to_builtins(record))

    def _build_record(self, ending: RankEnding) -> RankResult:
        return RankResult(
            rank=self._rank,
            local_rank=self._local_rank,
            ending=ending,
            finished=self.finished,
            step=self.step,
            committed_step=self.committed_step,
            exit_code=0,
            reason=self.reason,
            budget_spent=self.budget_spent,
            peak_allocated_gib=peak_allocated_gib(self.device),
        )


@functools.cache
def current() -> RankResultWriter:
    """Return the result of this process: the session fills it in, and ``train.main`` completes it after the script."""
    return RankResultWriter()

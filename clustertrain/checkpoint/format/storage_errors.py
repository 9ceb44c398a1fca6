"""Failures of the file system: transient ones, which are retried, and permanent ones."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from clustertrain import clock
from clustertrain.errors import CheckpointError

# Permanent until somebody makes room or grants permission.
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM})
# Often transient. A file system may be read-only during a repair, or on one node after an error.
TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EROFS})
RETRY_TIMEOUT_S = 2.0
RETRY_INTERVAL_S = 0.5

T = TypeVar("T")


class StorageError(CheckpointError):
    """The file system refused to read or write; the bytes on it may be intact.

    With ``full`` (:data:`FULL_ERRNOS`) a retry would fail the same way.
    """

    def __init__(self, message: str, *, full: bool = False) -> None:
        fix = "make room, or allow writing there, then continue the run with `clustertrain requeue`" if full else None
        super().__init__(message, fix=fix)
        self.full = full


def with_retries(operation: Callable[[], T], target: object) -> T:
    """Return the result of ``operation``, retried for `RETRY_TIMEOUT_S` while it fails with a transient error.

    Raises:
        FileNotFoundError, NotADirectoryError: the file does not exist.
        StorageError: any other failure of the file system; the message names ``target``.
    """
    results: list[T] = []
    last_error: list[OSError] = []

    def attempt() -> bool:
        try:
            results.append(operation())
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as e:
            if e.errno == errno.ELOOP:  # a link to itself has no target
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ELOOP), str(target)) from e
            last_error[:] = [e]
            return e.errno not in TRANSIENT_ERRNOS
        return True

    clock.wait_until(attempt, RETRY_TIMEOUT_S, RETRY_INTERVAL_S)
    if results:
        return results[0]
    e = last_error[0]
    raise StorageError(f"{target}: {e.strerror or e}", full=e.errno in FULL_ERRNOS) from e


_warned: set[str] = set()


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a failure that every save would repeat."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)

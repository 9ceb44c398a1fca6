"""When the file system fails: for a moment, for good, or because what was asked for is not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from clustertrain import clock
from clustertrain.errors import CheckpointError

# Until somebody makes room, or gives permission.
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM})
# A server's bad minute. A file system that is read-only is so for the time of a repair, or on one node after an error.
TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EROFS})
RETRY_TIMEOUT_S = 2.0
RETRY_INTERVAL_S = 0.5

T = TypeVar("T")


class StorageError(CheckpointError):
    """The file system refused to read or write. With ``full`` it would refuse again, otherwise perhaps not. It says
    nothing about the bytes that are there."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        fix = "make room there, or allow writing, then continue the run with `clustertrain requeue`" if full else None
        super().__init__(message, fix=fix)
        self.full = full


def with_retries(operation: Callable[[], T], target: object) -> T:
    """What ``operation`` returns, tried again for a moment while the file system fails in a way that may pass.

    Raises:
        FileNotFoundError, NotADirectoryError: it is not there.
        StorageError: any other failure of the file system; it names ``target``.
    """
    results: list[T] = []
    last_error: list[OSError] = []

    def attempt() -> bool:
        try:
            results.append(operation())
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as e:
            if e.errno == errno.ELOOP:  # a link to itself leads to nothing
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ELOOP), str(target)) from e
            last_error[:] = [e]
            return e.errno not in TRANSIENT_ERRNOS
        return True

    clock.wait_until(attempt, RETRY_TIMEOUT_S, RETRY_INTERVAL_S)
    if results:
        return results[0]
    e = last_error[0]
    raise StorageError(f"{target}: {e.strerror or e}", full=e.errno in FULL_ERRNOS) from e

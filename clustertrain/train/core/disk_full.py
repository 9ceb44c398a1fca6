"""Detection of failures that a full disk or quota caused, and of the disk that is full."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from clustertrain import settings

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_MESSAGES = ("no space left on device", "disk quota exceeded")
# torch.save with a path: torch 2.13 writes through a C++ stream, which reports a failure without its cause.
_STREAM_MESSAGES = ("pytorchstreamwriter", "unexpected pos", "iostream error")
_SHARED_MEMORY = Path("/dev/shm")
_MIN_FREE_BYTES = 1 << 20
_MAX_FRAMES = 64


def exception_chain(error: BaseException) -> list[BaseException]:
    """Return ``error`` and the exceptions that it was raised from or while handling."""
    exceptions: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in exceptions:
        exceptions.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return exceptions


def is_disk_full(error: BaseException) -> bool:
    """Return whether a full disk or quota caused ``error``."""
    errors = exception_chain(error)
    if any(isinstance(e, OSError) and e.errno in _FULL_ERRNOS for e in errors):
        return True
    messages = [str(e).lower() for e in errors]
    if any(phrase in message for phrase in _FULL_MESSAGES for message in messages):
        return True
    return is_failed_write(error) and find_full_path(error) is not None


def is_failed_write(error: BaseException) -> bool:
    """Return whether torch failed to write a file, for any reason."""
    return any(
        isinstance(e, RuntimeError) and any(phrase in str(e).lower() for phrase in _STREAM_MESSAGES)
        for e in exception_chain(error)
    )


def format_advice(error: BaseException) -> str:
    """Return advice on a full disk or a failed write; empty if neither caused ``error``."""
    if not is_disk_full(error):
        return "torch could not write a file\n  fix: check the disk that it writes to" if is_failed_write(error) else ""
    filename = next((str(e.filename) for e in exception_chain(error) if isinstance(e, OSError) and e.filename), None)
    full_path = find_full_path(error)
    folder = "the current folder" if full_path == Path() else full_path
    disk = f"the disk of {folder}" if folder is not None else filename or "a disk or quota"
    fix = "free space there (see `df -h`, `df -i` and your quota) or write somewhere else"
    if full_path == _SHARED_MEMORY:
        fix = "use fewer data loader workers, or give the container more shared memory"
    return f"{disk} is full\n  fix: {fix}, then continue the run with `clustertrain requeue`"


def find_full_path(error: BaseException) -> Path | None:
    """Return the first path related to ``error`` whose disk is full; None if there is none, as with a full quota."""
    checked_devices: set[int] = set()
    for path in _candidate_paths(error):
        try:
            device = path.stat().st_dev
            if device in checked_devices:
                continue
            checked_devices.add(device)
            stats = os.statvfs(path)
        except (OSError, ValueError):
            continue
        if stats.f_blocks and (
            stats.f_bavail * stats.f_frsize < _MIN_FREE_BYTES or (stats.f_files and not stats.f_favail)
        ):
            return path
    return None


def _candidate_paths(error: BaseException) -> Iterator[Path]:
    """Yield paths, most likely first: those the error names, those in local variables of the traceback, common ones."""
    for e in exception_chain(error):
        if isinstance(e, OSError) and isinstance(e.filename, str):
            yield from _with_parent(e.filename)
    for e in exception_chain(error):
        yield from _paths_in_frames(e)
    for name in (settings.RUN_DIR, settings.RANK_DIR, settings.USER_HOME):
        if os.environ.get(name):
            yield Path(os.environ[name])
    # Not tempfile.gettempdir(): it raises on a full disk.
    yield from (Path(), Path("/tmp"), _SHARED_MEMORY)


def _paths_in_frames(error: BaseException) -> Iterator[Path]:
    """Yield the paths in local variables of the traceback, since a failed write rarely names its file."""
    frames = []
    tb = error.__traceback__
    while tb is not None:
        frames.append(tb.tb_frame)
        tb = tb.tb_next
    for frame in reversed(frames[-_MAX_FRAMES:]):
        for value in frame.f_locals.values():
            name = getattr(value, "name", None) if isinstance(value, io.IOBase) else value
            if isinstance(name, (str, PurePath)):
                yield from _with_parent(str(name))


def _with_parent(name: str) -> Iterator[Path]:
    if os.sep in name and len(name) < 4096 and "\0" not in name:
        yield from (Path(name), Path(name).parent)

"""Whether a failure is one of a full disk or quota, and which disk it is."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from clustertrain import settings

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_WORDS = ("no space left on device", "disk quota exceeded")
# torch.save with a path: torch 2.13 writes through a C++ stream, which knows that it failed but not why.
_STREAM_WORDS = ("pytorchstreamwriter", "unexpected pos", "iostream error")
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_BYTES = 1 << 20
_MOST_FRAMES = 64


def chain(error: BaseException) -> list[BaseException]:
    """``error`` and what it was raised from, or while handling."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return found


def is_full(error: BaseException) -> bool:
    """Whether ``error`` comes from a disk or quota that is full."""
    errors = chain(error)
    if any(isinstance(e, OSError) and e.errno in _FULL for e in errors):
        return True
    words = [str(e).lower() for e in errors]
    if any(full in w for full in _FULL_WORDS for w in words):
        return True
    return is_failed_write(error) and full_place(error) is not None


def is_failed_write(error: BaseException) -> bool:
    """Whether torch could not write a file, for whatever reason."""
    return any(isinstance(e, RuntimeError) and any(w in str(e).lower() for w in _STREAM_WORDS) for e in chain(error))


def advice(error: BaseException) -> str:
    """What was full, and what to do; empty where ``error`` is neither :func:`is_full` nor :func:`is_failed_write`."""
    if not is_full(error):
        return "torch could not write a file\n  fix: look at the disk that it was for" if is_failed_write(error) else ""
    named = next((str(e.filename) for e in chain(error) if isinstance(e, OSError) and e.filename), None)
    place = full_place(error)
    folder = "the current folder" if place == Path() else place
    where = f"the disk of {folder}" if folder is not None else named or "a disk or quota"
    fix = "make room there (see `df -h`, `df -i` and your quota) or write somewhere else"
    if place == _SHARED_MEMORY:
        fix = "use fewer workers of data loaders, or give the container more shared memory"
    return f"{where} is full\n  fix: {fix}, then continue the run with `clustertrain requeue`"


def full_place(error: BaseException) -> Path | None:
    """The first path that the failure had to do with whose disk has no room; None where that cannot be seen, as with a
    quota."""
    seen: set[int] = set()
    for path in _places(error):
        try:
            device = path.stat().st_dev
            if device in seen:
                continue
            seen.add(device)
            room = os.statvfs(path)
        except (OSError, ValueError):
            continue
        if room.f_blocks and (room.f_bavail * room.f_frsize < _LEAST_BYTES or (room.f_files and not room.f_favail)):
            return path
    return None


def _places(error: BaseException) -> Iterator[Path]:
    """The likeliest first: named by the error, held in a variable where it arose, usual ones."""
    for e in chain(error):
        if isinstance(e, OSError) and isinstance(e.filename, str):
            yield from _around(e.filename)
    for e in chain(error):
        yield from _of_frames(e)
    for name in (settings.RUN_DIR, settings.RANK_DIR, settings.USER_HOME):
        if os.environ.get(name):
            yield Path(os.environ[name])
    # Not tempfile.gettempdir(): where there is no room it raises.
    yield from (Path(), Path("/tmp"), _SHARED_MEMORY)


def _of_frames(error: BaseException) -> Iterator[Path]:
    """The write that fails rarely says where it went, but a function on the way was given the path."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames[-_MOST_FRAMES:]):
        for value in frame.f_locals.values():
            name = getattr(value, "name", None) if isinstance(value, io.IOBase) else value
            if isinstance(name, (str, PurePath)):
                yield from _around(str(name))


def _around(name: str) -> Iterator[Path]:
    if os.sep in name and len(name) < 4096 and "\0" not in name:
        yield from (Path(name), Path(name).parent)

"""Durable files: temporary file, fsync, rename, fsync of the folder. Appended lines are whole or absent.

Files are readable by the group. The mode of the run folder (0700, or 0750 with --share) decides whether the group can
reach them. For the processes of a shared run, a umask that would deny the group access is loosened.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from clustertrain import reading, settings

# Errors of link(2) on a file system without hard links: EPERM according to POSIX, the others from some FUSE and CIFS.
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def fsync_folder(folder: Path) -> None:
    """Make created, renamed and removed entries of ``folder`` durable."""
    with _open_folder(folder) as fd:
        os.fsync(fd)


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_write(path: Path, *, mode: int = 0o640, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` atomically when the block ends, and is removed if the block raises.

    Readers see the complete old file or the complete new one. With ``durable``, that also holds after a crash.

    Raises:
        OSError: the file cannot be written; ``filename`` is ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    with contextlib.ExitStack() as stack:
        try:
            # A reader may rename the folder as soon as it sees the file, so the folder is not looked up again then.
            folder = stack.enter_context(_open_folder(path.parent)) if durable else None
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except OSError as e:
            e.filename = str(path)
            raise
        try:
            with os.fdopen(fd, "wb") as f:
                yield f
                f.flush()
                if durable:
                    os.fsync(f.fileno())
            temporary.replace(path)
        except BaseException as e:
            temporary.unlink(missing_ok=True)
            if isinstance(e, OSError) and e.filename is None:  # write(2) on a full disk does not report the name
                e.filename = str(path)
            raise
        if folder is not None:
            os.fsync(folder)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o640) -> None:
    """Replace the content of ``path`` with ``data``, atomically and durably; see :func:`atomic_write`."""
    with atomic_write(path, mode=mode) as f:
        f.write(data)


def write_text(path: Path, text: str, *, mode: int = 0o640) -> None:
    """Write ``text`` as UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode(), mode=mode)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON; see :func:`write_bytes`."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False) + "\n")


def create_json(path: Path, value: Any) -> bool:
    """Create ``path`` with ``value``, complete and durable; return False if it already exists.

    Of several processes that call this at the same time, also over NFS, exactly one succeeds. On a file system without
    hard links, a reader may find the file empty for a moment.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    write_json(temporary, value)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # An NFS client that received no answer repeats the request, which fails because the first one created the file.
        return temporary.stat().st_nlink == 2
    except OSError as e:
        if e.errno not in _NO_HARD_LINKS:
            raise
        return _create_exclusive(path, temporary.read_bytes())
    finally:
        temporary.unlink()
    fsync_folder(path.parent)
    return True


def _create_exclusive(path: Path, data: bytes) -> bool:
    """Create ``path`` with ``data`` without hard links (exFAT, many FUSE file systems, some CIFS mounts)."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    except FileExistsError:
        return False
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # otherwise nobody could create it
        raise
    fsync_folder(path.parent)
    return True


def read_json(path: Path) -> Any | None:
    """Return the JSON in ``path``; None if the file is missing or empty, as it may briefly be on NFS during a rename.

    Raises:
        reading.UnusableFile: ``path`` is not JSON, too large, or not a file.
    """
    try:
        return reading.read_json(path)
    except FileNotFoundError:
        return None


def poll_json(path: Path) -> Any | None:
    """Return the JSON in a file that another process may write at any moment; None if it cannot be read yet.

    Errors count as "nothing new yet": a rename in progress on NFS, a server that does not answer, invalid JSON. The
    folder is listed first, because an NFS client caches "no such file" for up to a minute, and opening a folder queries
    the server.
    """
    try:
        return read_json(path) if path in path.parent.iterdir() else None
    except (OSError, ValueError):
        return None


class JsonlAppender:
    """Writer that appends JSON lines to a file of which this process is the only writer.

    Lines never interleave. If the process is killed during a write, :func:`read_jsonl` skips the torn last line.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        # Terminate the torn line of a killed predecessor, so that the first new line does not continue it.
        if os.fstat(self._fd).st_size and _read_last_byte(path) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, *records: dict[str, Any], sync: bool = False) -> None:
        """Append one line per record, with fsync if ``sync``. Do nothing after :meth:`close`."""
        if self._fd is None or not records:
            return
        data = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records).encode()
        while data:
            data = data[os.write(self._fd, data) :]
        if sync:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _read_last_byte(path: Path) -> bytes:
    with reading.open_regular(path) as f:
        f.seek(-1, os.SEEK_END)
        return f.read(1)


def read_jsonl(path: Path, limit: int = reading.MAX_LINES_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the last ``limit`` bytes of an append-only file; none if the file is missing.

    Incomplete lines are skipped: their writer was killed or is still writing.

    Raises:
        reading.UnusableFile: ``path`` is not a file.
    """
    with contextlib.suppress(FileNotFoundError):
        yield from _iter_records(reading.iter_lines(path, limit))


def read_jsonl_tail(path: Path, size: int) -> list[dict[str, Any]]:
    """Return the JSON objects in the last ``size`` bytes of ``path``; none if it is missing or unreadable.

    Incomplete lines are skipped, including a first line that begins before these bytes.
    """
    try:
        return list(_iter_records(reading.iter_lines(path, size)))
    except OSError:
        return []


def parse_records(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the JSON objects in ``lines``, without lines that are torn or contain another type."""
    return list(_iter_records(lines))


def _iter_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            record = reading.parse_json(line.decode(errors="replace"))
            if isinstance(record, dict):
                yield record


def make_folder(path: Path) -> None:
    """Create ``path`` and missing parent folders, each with the group permissions of its parent.

    The run folder of this process is never created: if it was removed, nobody would find files in a new one.

    Raises:
        FileNotFoundError: the run folder of this process is gone.
    """
    if not path.is_dir():
        if str(path) == os.environ.get(settings.RUN_DIR):
            raise FileNotFoundError(errno.ENOENT, "the run folder is gone", str(path))
        make_folder(path.parent)
        claim_folder(path)


def claim_folder(path: Path, *, mode: int | None = None) -> bool:
    """Create the folder ``path``; return False if it already exists.

    Unlike file locks, mkdir is atomic on NFS and Lustre. The folder gets ``mode`` regardless of the umask; by default,
    the group permissions of its parent.
    """
    target_mode = 0o700 | (path.parent.stat().st_mode & 0o050) if mode is None else mode
    try:
        path.mkdir(mode=target_mode)
    except FileExistsError:
        return False
    actual_mode = path.stat().st_mode
    if actual_mode & 0o777 != target_mode:
        path.chmod(actual_mode & 0o7000 | target_mode)  # keep the setgid bit, by which folders may inherit their group
    return True


def rename_folder(source: Path, target: Path) -> bool:
    """Rename ``source``, a nonempty sibling of ``target``; return False if ``target`` already exists and is not empty.

    The rename is atomic on NFS and Lustre, so a process that sees the folder sees its complete content.
    """
    inode = source.stat().st_ino
    try:
        source.rename(target)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        # An NFS client that received no answer repeats the request, which fails if the first one succeeded.
        if e.errno != errno.ENOENT or not target.is_dir() or target.stat().st_ino != inode:
            raise
    with contextlib.suppress(OSError):  # the rename succeeded: a retry would find this process's own folder
        fsync_folder(target.parent)
    return True


@contextlib.contextmanager
def group_umask(folder: Path) -> Iterator[None]:
    """Within the block, let the group read new files if it may read ``folder``; child processes inherit the setting."""
    previous_umask = set_group_umask(folder)
    try:
        yield
    finally:
        os.umask(previous_umask)


def set_group_umask(folder: Path) -> int:
    """Set the umask of :func:`group_umask` for this process and its children; return the previous umask."""
    previous_umask = os.umask(0o077)
    os.umask(previous_umask & ~(folder.stat().st_mode & 0o050))
    return previous_umask

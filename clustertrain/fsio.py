"""Durable files: temporary file, fsync, rename, fsync of the folder. Appended lines are whole or absent.

Files may be read by the group; whether the group gets to them is up to the run's folder (0700, or 0750 with --share).
A umask that would close them to it is loosened for the processes of a run that is shared.
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

# What link(2) says of a file system without hard links: EPERM by POSIX, the others by some of FUSE and CIFS.
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_write(path: Path, *, mode: int = 0o640, durable: bool = True) -> Iterator[BinaryIO]:
    """A file beside ``path`` to write into, which takes its place atomically when the block ends well, and goes away
    otherwise. Readers see the old file or the new one, whole. ``durable``: and so do they after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as f:
            yield f
            f.flush()
            if durable:
                os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None:  # of write(2), on a full disk: it does not know the name
            e.filename = str(path)
        raise
    if durable:
        fsync_folder(path.parent)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o640) -> None:
    """Replace ``path`` by ``data`` atomically and durably. Readers see the old file or the new one, whole."""
    with atomic_write(path, mode=mode) as f:
        f.write(data)


def write_text(path: Path, text: str, *, mode: int = 0o640) -> None:
    write_bytes(path, text.encode(), mode=mode)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=False) + "\n")


def create_json(path: Path, value: Any) -> bool:
    """Make ``path`` with ``value`` in it, whole and durable; False where it is there already. Of several who do this at
    once, on NFS too, one succeeds. Without hard links, a reader may find the file empty for a moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    write_json(temporary, value)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A client of NFS that got no answer asks again, and is then told that the file is there: the one that it made.
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
    """:func:`create_json` without hard links (exFAT, many FUSE file systems, some mounts of CIFS)."""
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
        path.unlink(missing_ok=True)  # else it would keep everybody else from making it
        raise
    fsync_folder(path.parent)
    return True


def read_json(path: Path) -> Any | None:
    """The JSON in ``path``, or None when the file is missing or (a reader beat a rename on NFS) empty.

    Raises:
        reading.UnusableFile: it is not JSON, or too large, or no file.
    """
    try:
        return reading.read_json(path)
    except FileNotFoundError:
        return None


def poll_json(path: Path) -> Any | None:
    """:func:`read_json` for a file that others may write at any moment, for polling: whatever goes wrong (half a rename
    on NFS, a server that does not answer, a bad line) means that there is nothing new yet.

    The folder is listed first, because an NFS client remembers "no such file" for up to a minute; opening a folder asks
    the server.
    """
    try:
        return read_json(path) if path in path.parent.iterdir() else None
    except (OSError, ValueError):
        return None


class JsonlAppender:
    """Appends JSON lines to a file that this process alone writes. Each line is one write(2), so readers and a kill
    never see two halves of different lines; a torn last line is skipped by :func:`read_jsonl`."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        # A predecessor that was killed mid-line must not glue its half to our first line.
        if os.fstat(self._fd).st_size and _read_last_byte(path) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, *records: dict[str, Any], sync: bool = False) -> None:
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
    """The JSON objects of an append-only file. Half a line (a writer killed, or still writing) is skipped, as is what
    lies before the last ``limit`` bytes. Raises reading.UnusableFile for what is no file."""
    with contextlib.suppress(FileNotFoundError):
        yield from _iter_records(reading.iter_lines(path, limit))


def read_jsonl_tail(path: Path, size: int) -> list[dict[str, Any]]:
    """As :func:`read_jsonl`, of the last ``size`` bytes; none where the file is missing or unreadable. A first line
    that is cut is skipped."""
    try:
        return list(_iter_records(reading.iter_lines(path, size)))
    except OSError:
        return []


def parse_records(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects among ``lines``; what is torn or something else is left out."""
    return list(_iter_records(lines))


def _iter_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            record = reading.parse_json(line.decode(errors="replace"))
            if isinstance(record, dict):
                yield record


def make_folder(path: Path) -> None:
    """Make ``path`` and what lacks above it, each as open to the group as the folder it is in. A process of a run does
    not make the folder of its run: where that was removed, nothing would be seen of what is written into another one.

    Raises:
        FileNotFoundError: the folder of this process's run is gone.
    """
    if not path.is_dir():
        if str(path) == os.environ.get(settings.RUN_DIR):
            raise FileNotFoundError(errno.ENOENT, "the folder of the run is gone", str(path))
        make_folder(path.parent)
        claim_folder(path)


def claim_folder(path: Path, *, mode: int | None = None) -> bool:
    """Make ``path``; False when somebody else made it first. mkdir is atomic on NFS and Lustre, file locks are not.

    Whatever the umask, it gets ``mode``, or is as open to the group as the folder it is in.
    """
    target_mode = 0o700 | (path.parent.stat().st_mode & 0o050) if mode is None else mode
    try:
        path.mkdir(mode=target_mode)
    except FileExistsError:
        return False
    actual_mode = path.stat().st_mode
    if actual_mode & 0o777 != target_mode:
        path.chmod(actual_mode & 0o7000 | target_mode)  # a site may hand its group down with the setgid bit
    return True


def rename_folder(source: Path, target: Path) -> bool:
    """Give a folder with something in it, made beside ``target``, that name; False when somebody else's has it. The
    rename is atomic on NFS and Lustre, and whoever sees the folder sees all that is in it."""
    inode = source.stat().st_ino
    try:
        source.rename(target)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        # An NFS client that got no answer asks again, and finds that its first request was carried out.
        if e.errno != errno.ENOENT or not target.is_dir() or target.stat().st_ino != inode:
            raise
    with contextlib.suppress(OSError):  # it has the name: whoever tried again would meet itself
        fsync_folder(target.parent)
    return True


@contextlib.contextmanager
def group_umask(folder: Path) -> Iterator[None]:
    """What is made here, or by a process that is started here, may be read by the group where ``folder`` may."""
    previous_umask = set_group_umask(folder)
    try:
        yield
    finally:
        os.umask(previous_umask)


def set_group_umask(folder: Path) -> int:
    """:func:`group_umask` for the rest of a process and its children; returns the umask that was."""
    previous_umask = os.umask(0o077)
    os.umask(previous_umask & ~(folder.stat().st_mode & 0o050))
    return previous_umask

"""Folders of checkpoints: a path, or a URL that fsspec supports (``s3://bucket/prefix``).

Readers accept both. :class:`RemoteFolder` has the methods of Path that reading needs. Like a file system it raises only
OSError, whatever the underlying library raises.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from clustertrain import reading
from clustertrain.config.checks.storage_paths import find_filesystem_class

# (buffer, offset) -> bytes read into the buffer, 0 at the end of the file.
PreadFn = Callable[[memoryview, int], int]

UPLOAD_PART_BYTES = 64 << 20  # part of an upload that is in memory at a time
_MAX_UPLOAD_PARTS = 9_000  # per object; stores allow 10,000
_CREDENTIALS_FIX = "the job needs credentials for it on every node: a file in the home folder, or names under [env]"


class RemoteFolder:
    """A file or folder at a URL. The store is not contacted until a method is called."""

    def __init__(self, url: str, *, _fs: Any = None, _path: str = "") -> None:
        """
        Raises:
            ConfigError: no package for such URLs is installed.
        """
        self._url = url.rstrip("/")
        if _fs is None:
            find_filesystem_class(url)
            import fsspec

            with _translate_errors():
                _fs, _path = fsspec.url_to_fs(url)  # type: ignore[no-untyped-call]
        self._fs = _fs
        self._path = _path.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFolder) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        return PurePosixPath(self._path).name

    @property
    def parent(self) -> RemoteFolder:
        parent_url = self._url.rpartition("/")[0]
        return RemoteFolder(parent_url, _fs=self._fs, _path=self._path.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self._url}/{name}", _fs=self._fs, _path=f"{self._path}/{name}")

    # -- reading

    def iterdir(self) -> Iterator[RemoteFolder]:
        with _translate_errors():
            self._fs.invalidate_cache()  # others write there
            paths = [p.rstrip("/") for p in self._fs.ls(self._path, detail=False)]
        return (self / PurePosixPath(p).name for p in paths if p != self._path)  # S3 may list the folder itself

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below, by relative path, in one request."""
        with _translate_errors():
            self._fs.invalidate_cache()
            infos = self._fs.find(self._path, detail=True)
        return {p[len(self._path) :].lstrip("/"): int(i["size"]) for p, i in infos.items()}

    def stat(self) -> os.stat_result:
        """Return type and size; the other fields are 0."""
        with _translate_errors():
            self._fs.invalidate_cache()
            info = self._fs.info(self._path)
        mode = stat.S_IFREG if info["type"] == "file" else stat.S_IFDIR
        return os.stat_result((mode, 0, 0, 0, 0, 0, int(info["size"] or 0), 0, 0, 0))

    def is_dir(self) -> bool:
        try:
            return stat.S_ISDIR(self.stat().st_mode)
        except FileNotFoundError:
            return False

    def read_bytes(self) -> bytes:
        with _translate_errors():
            return bytes(self._fs.cat_file(self._path))

    def pread(self, buffer: memoryview, offset: int) -> int:
        with _translate_errors():
            data = self._fs.cat_file(self._path, start=offset, end=offset + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    # -- writing

    def write_bytes(self, data: bytes) -> None:
        with self.open_writer(len(data)) as out:
            out(data)

    @contextmanager
    def open_writer(self, size: int) -> Iterator[Callable[[bytes], None]]:
        """Replace the file: yield a function that writes its next bytes, ``size`` in total.

        A store keeps the old file until the end; a file system does not.
        """
        block = max(UPLOAD_PART_BYTES, -(-size // _MAX_UPLOAD_PARTS))
        with _translate_errors():
            try:
                out = self._fs.open(self._path, "wb", block_size=block)
            except FileNotFoundError:  # stores have no folders
                self._fs.makedirs(self.parent._path, exist_ok=True)
                out = self._fs.open(self._path, "wb", block_size=block)

        def write(data: bytes) -> None:
            with _translate_errors():
                out.write(data)

        try:
            yield write
        finally:
            with _translate_errors():
                out.close()

    def unlink(self) -> None:
        """Delete the file if it exists."""
        with _translate_errors():
            try:
                self._fs.rm_file(self._path)
            except FileNotFoundError:
                return

    def rmtree(self) -> None:
        """Delete the folder if it exists."""
        with _translate_errors():
            try:
                self._fs.invalidate_cache()
                self._fs.rm(self._path, recursive=True)
            except FileNotFoundError:
                return


Folder = Path | RemoteFolder
F = TypeVar("F", bound=Folder)


def join_path(folder: F, name: str) -> F:
    return folder / name  # type: ignore[return-value]


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Translate the exceptions of the libraries below fsspec into OSErrors.

    Raises:
        OSError: any failure; EIO if it may be transient.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except Exception as e:
        if isinstance(e, PermissionError) or "Credentials" in type(e).__name__:
            raise PermissionError(errno.EACCES, f"access denied: {_error_text(e)} ({_CREDENTIALS_FIX})") from e
        if isinstance(e, OSError) and e.errno is not None:
            raise
        raise OSError(errno.EIO, _error_text(e)) from e


def _error_text(e: BaseException) -> str:
    text = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
    return f"{type(e).__name__}: {text}" if not isinstance(e, OSError) or not text else text


@contextmanager
def open_pread(path: Folder) -> Iterator[PreadFn]:
    """Open a file to read parts of it.

    Raises:
        OSError: it does not exist, …
    """
    if isinstance(path, RemoteFolder):
        yield path.pread
        return
    with reading.open_regular(path) as file:
        fd = file.fileno()
        yield lambda into, offset: os.preadv(fd, [into], offset)

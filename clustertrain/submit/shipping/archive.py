"""The archives of environments, ``$CLUSTERTRAIN_HOME/environments/<hash>.tar``: each is packed once."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from clustertrain import clock, fsio, settings
from clustertrain.errors import ConfigError
from clustertrain.run import attempts, run_dir, state
from clustertrain.run.run_dir import RunDir
from clustertrain.run.shipped_environment import END, ShippedEnvironment, archives_folder, load_shipped_environment
from clustertrain.submit.shipping.environment import PythonEnvironment
from clustertrain.submit.shipping.files import THREADS, Entry, Listing, hash_files, list_files

if TYPE_CHECKING:
    from clustertrain.submit.shipping.ship import OnProgress

KEEP_S = 30 * 86400.0  # for an archive that no run has used
ABANDONED_S = 86400.0  # for the file of a process that was killed while it packed
_READ_AHEAD_BYTES = 2**20  # files up to this size are read by threads
_CHUNK_BYTES = 2**22
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def pack(environment: PythonEnvironment, on_progress: OnProgress | None = None) -> tuple[ShippedEnvironment, list[str]]:
    """Pack an environment unless its archive exists; return it, and the folders outside to which its links lead.

    Two processes that pack the same environment at once write the same archive, and the later rename wins.

    Raises:
        ConfigError: a file cannot be read, changed meanwhile, or the filesystem of the archives is full.
    """
    folder = archives_folder()
    try:
        listing = list_files(environment, exclude=settings.home())
        digest = hash_files(environment, listing.entries)
        path = folder / f"{digest}.tar"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            remove_unused(folder)
            _check_space(folder, environment, listing)
            with fsio.atomic_write(path, mode=0o600) as file:
                _write(file, listing.entries, on_progress or (lambda done, total: None), listing.size_bytes)
        os.utime(path)
    except OSError as e:
        raise _explain(e, environment, folder) from e
    shipped = ShippedEnvironment(
        hash=digest,
        prefixes=environment.prefixes,
        archive=str(path),
        base_python=environment.version if environment.base_python is not None else "",
    )
    return shipped, listing.outside


def remove_unused(folder: Path) -> None:
    """Remove archives that were not used for :data:`KEEP_S` and that no run needs which may still continue.

    A submission and each attempt of a run set the time of its archive. Without it, a run uses the shared environment.
    """
    now = clock.now()
    old = [path for path in folder.glob("*.tar") if not path.name.startswith(".") and _age_s(path, now) > KEEP_S]
    needed = _list_needed() if old else set()
    abandoned = [path for path in folder.glob(".*.tar.*") if _age_s(path, now) > ABANDONED_S]
    for path in [*(path for path in old if str(path) not in needed), *abandoned]:
        path.unlink(missing_ok=True)


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:  # another process removed it
        return 0.0


def _list_needed() -> set[str]:
    """Return the archives of all runs whose files do not say that they have ended for good."""
    runs = [RunDir(path.parent) for path in run_dir.runs_folder().glob("*/environment.json")]
    return {
        shipped.archive
        for run in runs
        if (shipped := load_shipped_environment(run)) is not None
        and not (run.cancel_marker.exists() or state.is_settled(attempts.load_attempts(run)))
    }


def _check_space(folder: Path, environment: PythonEnvironment, listing: Listing) -> None:
    free = shutil.disk_usage(folder).free
    if free < listing.size_bytes:
        raise ConfigError(
            f"--ship-env: {environment.prefix} takes {listing.size_bytes / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB free",
            fix=f"free space there, set {settings.HOME} to another folder, or submit without --ship-env",
        )


def _write(file: BinaryIO, entries: Sequence[Entry], on_progress: OnProgress, total: int) -> None:
    """Write a tar file. ``tarfile`` itself would open the files one after the other."""
    done = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for entry, content in _read_ahead(pool, entries):
            # GNU's format has no limits for names and sizes.
            file.write(_build_header(entry).tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
            if entry.kind == "file":
                _write_content(file, entry, content)
            done += entry.size
            on_progress(done, total)
    file.write(_build_header(Entry(END, "file")).tobuf(tarfile.GNU_FORMAT))
    file.write(bytes(2 * tarfile.BLOCKSIZE))


def _build_header(entry: Entry) -> tarfile.TarInfo:
    """Return the header of an entry. Its size is that of the listing."""
    header = tarfile.TarInfo(entry.name)
    header.mtime = entry.mtime_ns // 10**9  # bytecode has the time of its source in seconds
    header.mode = entry.mode | 0o600
    if entry.kind == "file":
        header.size = entry.size
    else:
        header.type = tarfile.DIRTYPE if entry.kind == "folder" else tarfile.SYMTYPE
        header.linkname = entry.target
    return header


def _write_content(file: BinaryIO, entry: Entry, content: bytes | None) -> None:
    written = 0
    if content is not None:
        written = file.write(content)
    else:
        with Path(entry.source).open("rb") as source:
            while written < entry.size and (chunk := source.read(min(_CHUNK_BYTES, entry.size - written))):
                written += file.write(chunk)
    if written != entry.size:
        raise ConfigError(f"--ship-env: {entry.source} changed while it was packed", fix="submit again")
    file.write(bytes(-written % tarfile.BLOCKSIZE))


def _read_ahead(pool: ThreadPoolExecutor, entries: Sequence[Entry]) -> Iterator[tuple[Entry, bytes | None]]:
    """Yield the entries in order, small files with their content: on a shared filesystem each takes milliseconds."""
    pending: deque[tuple[Entry, Future[bytes] | None]] = deque()
    for entry in entries:
        is_small = entry.kind == "file" and entry.size <= _READ_AHEAD_BYTES
        pending.append((entry, pool.submit(Path(entry.source).read_bytes) if is_small else None))
        if len(pending) > 2 * THREADS:
            first, content = pending.popleft()
            yield first, content.result() if content is not None else None
    for first, content in pending:
        yield first, content.result() if content is not None else None


def _explain(e: OSError, environment: PythonEnvironment, folder: Path) -> ConfigError:
    name = f"{e.filename}: " if e.filename else ""
    if e.errno in _FULL:
        fix = f"free space in {folder}, set {settings.HOME} to another folder, or submit without --ship-env"
    else:
        fix = "make it readable and writable for you, or submit without --ship-env"
    return ConfigError(f"--ship-env: {environment.prefix} cannot be packed: {name}{e.strerror or e}", fix=fix)

"""The copy of a run's Python environment on a node's local disk, which the jobs of a user share.

In the node's folder each environment has a folder of its own, named by its hash:

    clustertrain-environments-<uid>/<hash>/    locked (flock) by each agent that uses it
        copy/environment/  copy/base/          complete, as it is renamed from partial/
        files.json                             names and sizes of its files, against programs that clean /tmp

A lock ends with the process that holds it, so a killed agent leaves at most a folder ``partial``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock, fsio, proc, schema, settings
from clustertrain.agent.relocation import RankPython, relocate_files
from clustertrain.config.checks.storage_paths import resolve_node_folder
from clustertrain.errors import ClusterTrainError
from clustertrain.run.events import EventLog
from clustertrain.run.shipped_environment import END, ShippedEnvironment
from clustertrain.submit.preflight.filesystem import find_shared_filesystem_type

KEEP_BYTES = 20 * 2**30  # of all copies that stay for later jobs
MARGIN_BYTES = 2**30  # that stay free for the job
POLL_S = 0.1
CHECK_STOP_S = 1.0  # reads a file of the run
WAIT_S = 900.0  # for another agent that unpacks the same environment
DAMAGED_WAIT_S = 60.0  # for other agents that use a damaged copy, or unpack it again
_BLOCKING_FACTOR = 2048  # tar reads 1 MiB at a time
_DEFAULT_FOLDERS = (settings.SLURM_TMPDIR, settings.TMPDIR)
_HASH = re.compile(r"[0-9a-f]{16}")


class NotCopied(Exception):
    """The ranks cannot run from a copy; the message says why."""


class Stopped(Exception):
    """The job has to stop, so the copy is not needed any more."""


class _Files(msgspec.Struct, frozen=True, kw_only=True):
    """The content of files.json."""

    bytes: int
    files: list[tuple[str, int]]
    """Path and size of each file."""
    boot_id: str
    """The start of the node. After a crash, files of the right size may be empty, since nothing waits for the disk."""


class EnvironmentCopy:
    """The copies of a user's environments on this node, and the one that this agent uses.

    Args of the constructor:
        folder: ``job.environment_dir``.
        should_stop: whether the job has to stop.
    """

    def __init__(self, folder: str, environ: Mapping[str, str], should_stop: Callable[[], bool]) -> None:
        self._folder, self._environ, self._should_stop = folder, environ, should_stop
        self._root: Path | None = None
        self._lock: int | None = None
        self._next_check = 0.0
        self.is_reused = True

    def prepare(self, environment: ShippedEnvironment) -> RankPython:
        """Return the Python of the copy, which is unpacked if it is not there. It stays until :meth:`release`.

        Raises:
            NotCopied: the ranks have to use the shared environment.
            Stopped: the job has to stop.
        """
        try:
            with contextlib.suppress(OSError):  # missing, or on a filesystem that the node may not write
                os.utime(environment.archive)  # it is in use
            self._root = _claim_root(_choose_folder(self._folder, self._environ))
            folder = self._root / environment.hash
            for _ in range(3):  # another agent may remove the copy between the two locks
                self._lock = self._wait_for_lock(folder, fcntl.LOCK_SH, WAIT_S)
                if _is_whole(folder):
                    os.utime(folder)
                    return RankPython(environment.prefixes, folder / "copy")
                self._unlock()
                wait_s = DAMAGED_WAIT_S if (folder / "copy").exists() else WAIT_S
                self._lock = self._wait_for_lock(folder, fcntl.LOCK_EX, wait_s)
                if not _is_whole(folder):
                    self.is_reused = False
                    self._unpack(environment, folder)
                self._unlock()
        except OSError as e:
            self._unlock()
            raise NotCopied(f"{e.filename or self._root or self._folder}: {e.strerror or e}") from e
        except ClusterTrainError as e:
            raise NotCopied(e.message) from e
        except BaseException:
            self._unlock()
            raise
        raise NotCopied(f"{folder} was removed while it was unpacked")

    def release(self) -> None:
        """Let others remove the copy, and remove those that exceed :data:`KEEP_BYTES`."""
        self._unlock()
        if self._root is not None:
            with contextlib.suppress(OSError):
                remove_copies(self._root, KEEP_BYTES)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_stop(self) -> None:
        if clock.monotonic() >= self._next_check:
            self._next_check = clock.monotonic() + CHECK_STOP_S
            if self._should_stop():
                raise Stopped

    def _wait_for_lock(self, folder: Path, kind: int, wait_s: float) -> int:
        """Return the locked folder, which is created if it does not exist."""
        deadline = clock.monotonic() + wait_s
        while True:
            folder.mkdir(mode=0o700, exist_ok=True)
            if (lock := _try_lock(folder, kind)) is not None:
                return lock
            self._check_stop()
            if clock.monotonic() >= deadline:
                raise NotCopied(f"{folder} was in use by other processes for {wait_s:g} s")
            clock.sleep(POLL_S)

    def _unpack(self, environment: ShippedEnvironment, folder: Path) -> None:
        partial, copy = folder / "partial", folder / "copy"
        for path in (partial, copy):
            shutil.rmtree(path, ignore_errors=True)
        self._make_room(Path(environment.archive).stat().st_size)
        partial.mkdir(mode=0o700)
        try:
            self._extract(environment.archive, partial, folder / "tar.log")
            relocate_files(partial, environment, copy)
            fsio.write_bytes(folder / "files.json", msgspec.json.encode(_list_files(partial)))
            partial.rename(copy)
        except BaseException:  # the job needs the space
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _make_room(self, size: int) -> None:
        """Remove other copies for one of ``size`` bytes, as the limit and the free space require."""
        assert self._root is not None
        needed = int(1.1 * size) + MARGIN_BYTES  # files take whole blocks
        remove_copies(self._root, KEEP_BYTES - size, needed)
        free = shutil.disk_usage(self._root).free
        if free < needed:
            raise NotCopied(f"{self._root} has {free / 1e9:.1f} GB free, and the copy needs {needed / 1e9:.1f} GB")

    def _extract(self, archive: str, folder: Path, log: Path) -> None:
        """Unpack with tar, which is five times as fast as Python's tarfile."""
        argv = ["tar", "--extract", "--force-local", f"--file={archive}", f"--directory={folder}"]
        argv += ["--no-same-owner", f"--blocking-factor={_BLOCKING_FACTOR}"]
        log.unlink(missing_ok=True)
        child = proc.start(argv, log=log, ignore_stop_signals=True)
        try:
            while child.poll() is None:
                self._check_stop()
                clock.wait_until(lambda: child.poll() is not None, POLL_S, POLL_S / 4)
        finally:
            proc.kill_process_tree(child)
        if child.returncode or not (folder / END).exists():
            lines = log.read_text(errors="replace").strip().splitlines() or ["its end is missing"]
            raise NotCopied(f"tar could not unpack {archive}: {lines[0]}")


def _choose_folder(text: str, environ: Mapping[str, str]) -> Path:
    """Return the folder for copies, on a disk of the node from which programs can be executed."""
    if text:
        folder = resolve_node_folder(text, environ, "environment_dir")
        folder.mkdir(parents=True, exist_ok=True)
        candidates = [folder]
    else:
        candidates = [Path(environ[name]) for name in _DEFAULT_FOLDERS if environ.get(name)] + [Path("/tmp")]
    problems = []
    for folder in candidates:
        problem = _find_folder_problem(folder)
        if not problem:
            return folder
        problems.append(problem)
    raise NotCopied("; ".join(problems))


def _find_folder_problem(folder: Path) -> str:
    if not folder.is_absolute() or not folder.is_dir():
        return f"{folder} is not a folder on this node"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not writable"
    if shared := find_shared_filesystem_type(folder):
        return f"{folder} is on a shared filesystem ({shared})"
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{folder} is mounted without permission to execute programs (noexec)"
    return ""


def _claim_root(folder: Path) -> Path:
    """Return this user's folder in ``folder``, in which others must not be able to place programs."""
    root = folder / f"clustertrain-environments-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    info = root.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise NotCopied(f"{root} is not a folder that only you can write")
    return root


def _try_lock(folder: Path, kind: int) -> int | None:
    """Lock ``folder``; return None if another process holds it, or has removed it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == folder.stat().st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _read_files(folder: Path) -> _Files | None:
    try:
        return schema.get_decoder(_Files).decode((folder / "files.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def _list_files(folder: Path) -> _Files:
    files = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            files.append((str(path.relative_to(folder)), path.lstat().st_size))
    return _Files(bytes=sum(size for _, size in files), files=files, boot_id=_read_boot_id())


def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_whole(folder: Path) -> bool:
    """Return whether the copy is complete. Programs that clean /tmp remove single files that nobody has read."""
    copy = folder / "copy"
    files = _read_files(folder) if copy.is_dir() else None
    try:
        if files is None or files.boot_id != _read_boot_id():
            return False
        return all(os.lstat(f"{copy}/{name}").st_size == size for name, size in files.files)
    except OSError:
        return False


def remove_copies(root: Path, max_bytes: int, needed_free: int = 0) -> None:
    """Remove copies that no agent uses until all take at most ``max_bytes`` and ``needed_free`` bytes are free.

    The least recently used is first. What a killed agent has left is removed in any case.
    """
    used = {path: _last_use(path) for path in root.iterdir() if _HASH.fullmatch(path.name)}
    sizes = {path: files.bytes if (files := _read_files(path)) is not None else 0 for path in used}
    total = sum(sizes.values())
    for path in sorted(used, key=lambda path: used[path]):
        is_leftover = sizes[path] == 0 or (path / "partial").exists()
        if not is_leftover and total <= max_bytes and shutil.disk_usage(root).free >= needed_free:
            continue
        lock = _try_lock(path, fcntl.LOCK_EX)
        if lock is None:
            continue
        try:
            shutil.rmtree(path, ignore_errors=True)
            total -= sizes[path]
        finally:
            os.close(lock)


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another agent has removed it
        return 0.0


def prepare_python(copy: EnvironmentCopy, environment: ShippedEnvironment, *, node: str, log: EventLog) -> RankPython:
    """Return the Python of the node's ranks: of the copy, or if there cannot be one, of the shared environment.

    Raises:
        Stopped: the job has to stop.
    """
    started = clock.monotonic()
    try:
        python = copy.prepare(environment)
    except NotCopied as e:
        log.write("environment_not_copied", node=node, reason=str(e))
        _print(node, f"the ranks use the shared environment, because it could not be copied: {e}")
        return RankPython(environment.prefixes)
    seconds = clock.monotonic() - started
    files: Any = _read_files(Path(str(python.copy)).parent)
    size = files.bytes if files is not None else None
    log.write(
        "environment_copied",
        node=node, hash=environment.hash, path=str(python.copy), reused=copy.is_reused, copy_s=seconds, bytes=size,
    )  # fmt: skip
    verb = "found" if copy.is_reused else "unpacked"
    _print(node, f"environment {environment.hash} {verb} in {python.copy} ({seconds:.1f} s)")
    return python


def _print(node: str, line: str) -> None:
    print(f"clustertrain agent on {node}: {line}", file=sys.stderr, flush=True)

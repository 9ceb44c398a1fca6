"""The files of an environment as its archive has them, and the hash that identifies them."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from clustertrain.run.shipped_environment import BASE, PREFIX
from clustertrain.submit.shipping.environment import PythonEnvironment

FORMAT = 1  # part of the hash: increase it when the archive of the same files changes
THREADS = 16  # operations at once: each may take milliseconds on a shared filesystem
_CACHE = "__pycache__"
_HASH_DIGITS = 16


class Entry(NamedTuple):  # a dataclass takes five times as long to create
    """A file, link or folder of an archive."""

    name: str
    """Path in the archive."""
    kind: Literal["file", "link", "folder"]
    source: str = ""
    """Path of a file."""
    target: str = ""
    """Target of a link."""
    mode: int = 0o755
    size: int = 0
    mtime_ns: int = 0


@dataclass
class Listing:
    """Everything that an archive contains, by name."""

    entries: list[Entry] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Links to folders outside of the environment, which stay links."""

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class _Root:
    """A folder whose files go into the archive."""

    source: str
    name: str
    """Its name in the archive."""
    skipped: frozenset[str] = frozenset()
    """Paths that are left out."""


def list_files(environment: PythonEnvironment, exclude: Path | None = None) -> Listing:
    """Return what the archive of an environment contains.

    Args:
        exclude: a folder to leave out (the runs, if they lie in the environment).

    Raises:
        OSError: a folder cannot be read.
    """
    listing = Listing()
    with ThreadPoolExecutor(THREADS) as pool:
        for root in _list_roots(environment, exclude):
            scan = functools.partial(_scan, root=root, environment=environment)
            folders = [(root.source, root.name)]
            while folders:
                parts = list(pool.map(scan, folders))
                folders = [subfolder for part in parts for subfolder in part.folders]
                for part in parts:
                    listing.entries += part.entries
                    listing.outside += part.outside
    listing.entries += _list_base_program(environment)
    listing.entries.sort(key=lambda entry: entry.name)
    return listing


def hash_files(environment: PythonEnvironment, entries: Iterable[Entry]) -> str:
    """Return the hash of an environment: names, kinds, modes, sizes and times of its files, and targets of its links.

    Contents are not read: a file that changed without its size and its time is not noticed. Bytecode is left out,
    because any process that imports a module may write it.
    """
    text = hashlib.sha256(repr((FORMAT, environment.prefixes)).encode(errors="surrogateescape"))
    for e in entries:
        if f"/{_CACHE}" not in e.name:
            row = (e.name, e.kind, e.target, e.mode, e.size, e.mtime_ns)
            text.update(repr(row).encode(errors="surrogateescape"))
    return text.hexdigest()[:_HASH_DIGITS]


def _list_roots(environment: PythonEnvironment, exclude: Path | None) -> Iterator[_Root]:
    prefix = environment.prefix
    # conda's base environment contains the others and the cache of packages.
    skipped = {prefix / "pkgs", prefix / "envs", *([exclude] if exclude is not None else [])}
    yield _Root(str(prefix), PREFIX, frozenset(map(str, skipped)))
    if environment.base_python is not None:
        base, version = environment.base_python.parent.parent, environment.version
        library = base / "lib" / version
        packages = () if environment.has_system_packages else (f"{library}/site-packages",)
        # Debian leaves out the tests of Python too.
        yield _Root(str(library), f"{BASE}/lib/{version}", frozenset({*packages, f"{library}/test"}))
        if (headers := base / "include" / version).is_dir():  # torch.compile compiles C++
            yield _Root(str(headers), f"{BASE}/include/{version}")


def _list_base_program(environment: PythonEnvironment) -> Iterator[Entry]:
    """Yield the interpreter of the base, its libraries and the folders that contain them."""
    if environment.base_python is None:
        return
    base = environment.base_python.parent.parent
    for folder in (BASE, f"{BASE}/bin", f"{BASE}/lib", f"{BASE}/include"):
        yield Entry(folder, "folder")
    for path in (environment.base_python, *sorted((base / "lib").glob("libpython*.so*"))):
        name = f"{BASE}/bin/{environment.version}" if path == environment.base_python else f"{BASE}/lib/{path.name}"
        yield _file_entry(name, str(path), path.stat())


@dataclass
class _Part:
    """What one folder contributes."""

    entries: list[Entry]
    folders: list[tuple[str, str]] = field(default_factory=list)
    """Path and name of the folders in it."""
    outside: list[str] = field(default_factory=list)


def _scan(folder: tuple[str, str], *, root: _Root, environment: PythonEnvironment) -> _Part:
    """Return the entries of one folder, with its own, and the folders in it."""
    source, name = folder
    part = _Part([Entry(name, "folder")])
    with os.scandir(source) as items:
        for item in items:
            path, item_name = item.path, f"{name}/{item.name}"
            if path in root.skipped or (root.name != PREFIX and item.name.endswith(".a")):
                continue
            if item.is_symlink():
                _add_link(part, item_name, Path(path), environment)
            elif item.is_dir(follow_symlinks=False):
                part.folders.append((path, item_name))
            elif item.is_file(follow_symlinks=False):
                part.entries.append(_file_entry(item_name, path, item.stat(follow_symlinks=False)))
    return part


def _file_entry(name: str, source: str, info: os.stat_result) -> Entry:
    return Entry(name, "file", source, "", stat.S_IMODE(info.st_mode) & 0o777, info.st_size, info.st_mtime_ns)


def _add_link(part: _Part, name: str, path: Path, environment: PythonEnvironment) -> None:
    """Add a link: relative inside the environment, as the file that it leads to, or absolute to a folder outside."""
    folder = str(PurePosixPath(name).parent)
    if environment.base_python is not None and os.path.realpath(path) == str(environment.base_python):
        part.entries.append(_link_entry(name, f"{BASE}/bin/{environment.version}"))
        return
    target = Path(os.path.normpath(path.parent / path.readlink()))
    for prefix in environment.prefixes:
        if target.is_relative_to(prefix):
            part.entries.append(_link_entry(name, str(PREFIX / target.relative_to(prefix))))
            return
    try:
        info = path.stat()
    except OSError:
        info = None
    # The interpreter stays a link: it looks for its libraries beside the file.
    is_program = folder == f"{PREFIX}/bin" and path.name.startswith("python")
    if info is not None and stat.S_ISREG(info.st_mode) and not is_program:
        part.entries.append(_file_entry(name, str(path), info))
        return
    part.entries.append(Entry(name, "link", target=str(target)))
    if info is not None and stat.S_ISDIR(info.st_mode):
        part.outside.append(f"{target} (linked from {path})")


def _link_entry(name: str, target: str) -> Entry:
    """Return a relative link; both arguments are names in the archive."""
    return Entry(name, "link", target=os.path.relpath(target, PurePosixPath(name).parent))

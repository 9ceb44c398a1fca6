"""Copies the user's code into ``code/``, so that a requeue runs what was submitted.

Taken are the files of the script's git repository that are tracked, or untracked and not ignored; without git, the
script's folder without caches and virtual environments. It is built beside its place and renamed: no half snapshots.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clustertrain import proc
from clustertrain.errors import CommandFailed, ConfigError

LIMIT_MIB = 100
MAX_FILES = 50_000
_MIB = 1024 * 1024
_SKIPPED_FOLDERS = frozenset({
    ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache",
    ".ruff_cache", ".cache", ".tox", ".nox", ".ipynb_checkpoints", ".eggs",
})  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """What was copied. ``script`` is relative to ``code/``; ``outside`` are links to folders that were not copied."""

    script: str
    root: Path
    files: int
    size_bytes: int
    outside: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Entry:
    name: str  # relative to the root
    kind: str  # file, link, outside
    size: int = 0
    target: str = ""  # of a link


def toplevel(folder: Path) -> Path | None:
    """The root of the git repository that ``folder`` is in, or None without one (or without git).

    Raises:
        ConfigError: git refuses the repository because somebody else owns it.
    """
    try:
        done = proc.run(["git", "-C", folder, "rev-parse", "--show-toplevel"], check=False)
    except CommandFailed:
        return None
    if "dubious ownership" in done.stderr:
        raise ConfigError(f"git does not trust the repository of {folder}: {done.stderr.strip()}")
    # --show-toplevel is empty inside of a .git folder and in a bare repository.
    return Path(done.stdout.rstrip("\n")) if done.returncode == 0 and done.stdout.strip() else None


def root_of(script: Path) -> Path:
    """The folder that a snapshot for ``script`` copies."""
    return toplevel(script.parent.resolve()) or script.parent.resolve()


def ignored(path: Path) -> bool:
    """Whether git leaves ``path`` out, and so a snapshot that is not taken for this file itself."""
    root = toplevel(path.parent.resolve())
    return root is not None and proc.run(["git", "-C", root, "check-ignore", "-q", path], check=False).returncode == 0


def take(script: Path, target: Path, *, limit_mib: int = LIMIT_MIB, without: Path | None = None) -> Snapshot:
    """Copy the code around ``script`` to the folder ``target``, which must not exist.

    Args:
        without: a folder that is left out with all in it (the runs themselves, where they lie in the repository).

    Raises:
        ConfigError: larger than ``limit_mib`` MiB (the largest files are named), or a file cannot be read.
    """
    # The folder's real place, but not the script's: a link to a script elsewhere stays a name in this folder.
    script = script.parent.resolve() / script.name
    repository = toplevel(script.parent)
    root = repository or script.parent
    listed = _walk(root) if repository is None else _git_files(root, "")
    names = _names(root, script, listed, without)
    entries = _describe(root, names)
    _check_size(root, entries, limit_mib)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for entry in entries:
            _copy(root, entry, scratch)
        scratch.rename(target)
    except OSError as e:
        raise ConfigError(f"the code in {root} could not be copied: {e}") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Snapshot(
        script=str(script.relative_to(root)),
        root=root,
        files=len(entries),
        size_bytes=sum(e.size for e in entries),
        outside=tuple(f"{e.name} -> {e.target}" for e in entries if e.kind == "outside"),
    )


def _names(root: Path, script: Path, listed: Iterator[str], without: Path | None) -> list[str]:
    left_out = f"{without.resolve()}{os.sep}" if without is not None else None
    names: dict[str, None] = {str(script.relative_to(root)): None}  # also where it is ignored
    for name in listed:
        if left_out is None or not f"{root / name}{os.sep}".startswith(left_out):
            names[name] = None
        if len(names) > MAX_FILES:
            raise ConfigError(
                f"more than {MAX_FILES} files in {root}: this looks like data, not code",
                fix="name the data in .gitignore, or put the script into a folder (a git repository) of its own",
            )
    return list(names)


def _git_files(root: Path, prefix: str) -> Iterator[str]:
    """Tracked and not ignored files below ``root/prefix``; submodules and nested repositories are entered."""
    folder = root / prefix
    listing = proc.run(["git", "-C", folder, "ls-files", "-coz", "--exclude-standard"]).stdout
    for name in listing.split("\0"):
        if not name:
            continue
        if "\ufffd" in name:
            raise ConfigError(f"{root}: the file name {name!r} is not UTF-8", fix="rename it, or ignore it")
        path = str(Path(prefix, name))
        full = root / path
        if full.is_dir() and not full.is_symlink():
            # git names a submodule and a nested repository by its folder; one without .git was never checked out.
            if (full / ".git").exists():
                yield from _git_files(root, path)
        else:
            yield path


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        links = [f for f in folders if (here / f).is_symlink()]
        folders[:] = sorted(
            f
            for f in folders
            if f not in _SKIPPED_FOLDERS and f not in links and not (here / f / "pyvenv.cfg").is_file()
        )
        for name in sorted([*files, *links]):
            if not name.endswith((".pyc", ".pyo")):
                yield str((here / name).relative_to(root))


def _describe(root: Path, names: list[str]) -> list[_Entry]:
    taken = set(names)
    # Folders that will exist in the snapshot, so that a link to one keeps its meaning.
    taken.update(str(p) for name in names for p in Path(name).parents)
    entries = []
    for name in names:
        entry = _entry(root, name, taken)
        if entry is not None:
            entries.append(entry)
    return entries


def _entry(root: Path, name: str, taken: set[str]) -> _Entry | None:
    path = root / name
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None  # tracked but deleted
    if stat.S_ISREG(info.st_mode):
        return _Entry(name, "file", info.st_size)
    if not stat.S_ISLNK(info.st_mode):
        return None  # sockets, pipes, devices
    real = Path(os.path.realpath(path))  # resolve() raises for a link that leads to itself
    inside = os.path.relpath(real, os.path.realpath(root))
    if inside in taken:
        return _Entry(name, "link", target=os.path.relpath(inside, Path(name).parent))
    if real.is_file():
        return _Entry(name, "file", real.stat().st_size)
    if real.is_dir():
        # Nearly always data, too big to copy, and of no use if missing: it stays where it is, and the user is told.
        return _Entry(name, "outside", target=str(real))
    return _Entry(name, "link", target=str(path.readlink()))  # leads nowhere here either


def _check_size(root: Path, entries: list[_Entry], limit_mib: int) -> None:
    total = sum(e.size for e in entries)
    if total <= limit_mib * _MIB:
        return
    largest = sorted(entries, key=lambda e: e.size, reverse=True)[:5]
    shown = "".join(f"\n    {e.size / _MIB:8.1f} MiB  {e.name}" for e in largest)
    raise ConfigError(
        f"the code in {root} is {total / _MIB:.1f} MiB, more than {limit_mib} MiB; the largest files:{shown}",
        fix="name what is not code in .gitignore, or raise --snapshot-limit-mib",
    )


def open_to(target: Path, group: int) -> None:
    """``group``: the bits that each folder there has for it, and that files have where their owner does."""
    for folder, _, files in os.walk(target):
        Path(folder).chmod(0o700 | group)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | (mode >> 3 & group))


def _copy(root: Path, entry: _Entry, scratch: Path) -> None:
    target = scratch / entry.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.kind == "file":
        shutil.copy2(root / entry.name, target)
    else:
        target.symlink_to(entry.target)

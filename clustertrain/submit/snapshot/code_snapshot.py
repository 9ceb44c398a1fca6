"""Copy the user's code into ``code/``, so that a requeue runs what was submitted.

A snapshot holds the files of the script's git repository that are tracked, or untracked and not ignored; without git,
the script's folder without caches and virtual environments. It omits files that look like secrets, and the targets of
links out of the repository. What git ignores, such as data beside the code, is a link to the original. The snapshot is
built under a temporary name and renamed, so a partial one is never visible.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from clustertrain.errors import CommandFailed, ConfigError
from clustertrain.submit.snapshot import git
from clustertrain.submit.snapshot.secret_files import is_likely_secret

DEFAULT_LIMIT_MIB = 100
MAX_FILES = 50_000
MAX_IGNORED = 10_000  # links to ignored files and folders
_MIB = 1024 * 1024
# --show-toplevel fails inside a .git folder and in a bare repository.
_NO_REPOSITORY = ("not a git repository", "must be run in a work tree", "cannot change to")
_FIX = "add files that are not code to .gitignore, or move the script to a folder of its own"
# Only git reads .gitignore.
_FIX_WITHOUT_GIT = (
    "the folder is not a git repository, so all files beside the script are copied: run `git init` in it and add files"
    " that are not code to .gitignore, or move the script to a folder of its own"
)
_SKIPPED_FOLDERS = frozenset({
    ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache",
    ".ruff_cache", ".cache", ".tox", ".nox", ".ipynb_checkpoints", ".eggs",
})  # fmt: skip


@dataclass(frozen=True)
class CodeSnapshot:
    """A copy of the user's code, with the files that were omitted."""

    script: str
    """The script or package, relative to ``code/``."""
    root: Path
    """The folder that was copied."""
    repository: Path | None
    """The same folder if it is that of a git repository."""
    files: int
    size_bytes: int
    largest_file: str
    external_links: tuple[str, ...] = ()
    """Links out of the repository, which stay links."""
    script_source: str = ""
    """If the script is such a link: its target, from which it is copied."""
    skipped_secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Entry:
    name: str
    """Path relative to the root."""
    kind: str
    """``file``, ``link``, ``outside`` or ``secret``."""
    size: int = 0
    target: str = ""
    """Target of a link."""


def find_repository_root(folder: Path) -> Path | None:
    """Return the root of the git repository that contains ``folder``; None without a repository or without git.

    Raises:
        ConfigError: git cannot use the repository: another user owns it, or its configuration is broken.
    """
    try:
        result = git.run(folder, "rev-parse", "--show-toplevel", check=False)
    except CommandFailed:
        return None
    if result.returncode and not any(message in result.stderr for message in _NO_REPOSITORY):
        raise ConfigError(
            f"git cannot read the repository of {folder}: {result.stderr.strip()}", fix=f"see `git -C {folder} status`"
        )
    root = Path(result.stdout.rstrip("\n"))
    # core.worktree can name any folder, and all of that would be copied.
    is_usable = result.returncode == 0 and (root / ".git").exists() and folder.resolve().is_relative_to(root)
    return root if is_usable else None


def find_snapshot_root(script: Path) -> Path:
    """Return the folder that a snapshot for ``script`` copies."""
    return find_repository_root(script.parent.resolve()) or script.parent.resolve()


def is_git_ignored(path: Path) -> bool:
    """Return whether git ignores ``path``; a snapshot then contains it only if it is the script itself."""
    root = find_repository_root(path.parent.resolve())
    return root is not None and git.run(root, "check-ignore", "-q", str(path), check=False).returncode == 0


def take_snapshot(
    script: Path,
    target: Path,
    *,
    limit_mib: int = DEFAULT_LIMIT_MIB,
    exclude: Path | None = None,
    include: Sequence[str] = (),
) -> CodeSnapshot:
    """Copy the code around ``script`` to the folder ``target``, which must not exist.

    Args:
        exclude: a folder to leave out (the runs, if they lie in the repository).
        include: patterns of paths that are copied although they look like secrets.

    Raises:
        ConfigError: the code is larger than ``limit_mib`` MiB (the message names the largest files), a pattern matches
            no file, or a file cannot be read.
    """
    # Resolve the folder but not the script: a link to a script elsewhere keeps its name in this folder.
    script = script.parent.resolve() / script.name
    repository = find_repository_root(script.parent)
    root = repository or script.parent
    candidates = _walk_files(root) if repository is None else _list_git_files(root, "")
    fix = _FIX if repository is not None else _FIX_WITHOUT_GIT
    names = _select_names(root, script, candidates, exclude, fix)
    script_name = str(script.relative_to(root))
    _check_include(include, names, root)
    entries = _classify_files(
        root, names, lambda path: path == script_name or any(fnmatchcase(path, p) for p in include)
    )
    _check_size(root, entries, limit_mib, fix)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for entry in entries:
            _copy_entry(root, entry, scratch)
        if repository is not None:
            _link_ignored(root, scratch, exclude)
        scratch.rename(target)
    except OSError as e:
        raise ConfigError(f"the code in {root} could not be copied: {e}") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return CodeSnapshot(
        script=script_name,
        root=root,
        repository=repository,
        files=sum(e.kind != "secret" for e in entries),
        size_bytes=sum(e.size for e in entries),
        largest_file=max(entries, key=lambda e: e.size).name,
        external_links=tuple(f"{e.name} -> {e.target}" for e in entries if e.kind == "outside"),
        script_source=next((e.target for e in entries if e.name == script_name and e.kind == "file"), ""),
        skipped_secrets=tuple(e.name for e in entries if e.kind == "secret"),
    )


def _check_include(patterns: Sequence[str], names: Sequence[str], root: Path) -> None:
    """Raise ConfigError for a pattern that matches nothing: the job would miss a file."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"--snapshot-include {shlex.quote(pattern)}: no file in {root} matches",
                fix=f"give a path relative to {root}; files that git ignores are never copied",
            )


def _select_names(root: Path, script: Path, candidates: Iterator[str], exclude: Path | None, fix: str) -> list[str]:
    excluded_prefix = f"{exclude.resolve()}{os.sep}" if exclude is not None else None
    names: dict[str, None] = {str(script.relative_to(root)): None}  # even if git ignores it
    is_behind_link = _build_link_check(root)
    for name in candidates:
        if is_behind_link(name):
            continue
        if excluded_prefix is None or not f"{root / name}{os.sep}".startswith(excluded_prefix):
            names[name] = None
        if len(names) > MAX_FILES:
            raise ConfigError(f"more than {MAX_FILES} files in {root}: this looks like data, not code", fix=fix)
    return list(names)


def _build_link_check(root: Path) -> Callable[[str], bool]:
    """Return a function that reports whether a parent folder of a path is a link.

    git still lists the files of a folder that was replaced by a link.
    """

    @functools.cache
    def is_linked(folder: Path) -> bool:
        return folder != Path() and ((root / folder).is_symlink() or is_linked(folder.parent))

    return lambda name: is_linked(Path(name).parent)


def _list_git_files(root: Path, prefix: str) -> Iterator[str]:
    """Yield the files below ``root/prefix`` that git tracks or does not ignore, including nested repositories."""
    folder = root / prefix
    listing = git.run(folder, "ls-files", "-coz", "--exclude-standard").stdout
    is_behind_link = _build_link_check(root)
    for name in listing.split("\0"):
        if not name:
            continue
        if "\ufffd" in name:
            raise ConfigError(f"{root}: the file name {name!r} is not UTF-8", fix="rename it, or add it to .gitignore")
        path = str(Path(prefix, name))
        full = root / path
        if full.is_dir() and not full.is_symlink() and not is_behind_link(path):
            # git lists a submodule and a nested repository as a folder; one without .git was never checked out.
            if (full / ".git").exists():
                yield from _list_git_files(root, path)
        else:
            yield path


def _link_ignored(root: Path, scratch: Path, exclude: Path | None) -> None:
    """Link what git ignores in ``root`` to the originals, except caches and environments.

    Programs read data from beside ``__file__``.
    """
    listing = git.run(root, "ls-files", "-oiz", "--exclude-standard", "--directory").stdout
    for name in [name.rstrip("/") for name in listing.split("\0") if name][:MAX_IGNORED]:
        path, link = root / name, scratch / name
        is_cache = not _SKIPPED_FOLDERS.isdisjoint(path.parts[len(root.parts) :]) or name.endswith((".pyc", ".pyo"))
        is_environment = (path / "pyvenv.cfg").is_file()
        holds_runs = exclude is not None and exclude.resolve().is_relative_to(path)
        if is_cache or is_environment or holds_runs or os.path.lexists(link):
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)


def _walk_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        parent = Path(folder)
        links = [f for f in folders if (parent / f).is_symlink()]
        folders[:] = sorted(
            f
            for f in folders
            if f not in _SKIPPED_FOLDERS and f not in links and not (parent / f / "pyvenv.cfg").is_file()
        )
        for name in sorted([*files, *links]):
            if not name.endswith((".pyc", ".pyo")):
                yield str((parent / name).relative_to(root))


def _classify_files(root: Path, names: list[str], is_included: Callable[[str], bool]) -> list[_Entry]:
    """Return the entries of the snapshot.

    Paths for which ``is_included`` is true are copied even if they look like secrets or lead out of the repository.
    """
    secret = {name for name in names if is_likely_secret(name) and not is_included(name)}
    copied_paths = {name for name in names if name not in secret}
    # Folders that will exist in the snapshot, so that a link to one keeps its meaning.
    copied_paths.update(str(p) for name in copied_paths.copy() for p in Path(name).parents)
    entries = []
    for name in names:
        entry = _classify_file(root, name, copied_paths, is_included)
        if entry is not None:
            entries.append(_Entry(name, "secret") if name in secret else entry)
    return entries


def _classify_file(root: Path, name: str, copied_paths: set[str], is_included: Callable[[str], bool]) -> _Entry | None:
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
    relative = os.path.relpath(real, os.path.realpath(root))
    if relative in copied_paths:
        return _Entry(name, "link", target=os.path.relpath(relative, Path(name).parent))
    is_inside = real.is_relative_to(os.path.realpath(root)) and ".git" not in Path(relative).parts
    try:
        info = real.stat()
    except OSError:
        return _Entry(name, "link", target=str(path.readlink()))  # a dangling link stays one
    if not stat.S_ISREG(info.st_mode) or not (is_inside or is_included(name)):
        # Usually data that is too large to copy, or another user's file: it stays there and is reported.
        return _Entry(name, "outside", target=str(real))
    if is_likely_secret(relative) and not is_included(name) and not is_included(relative):
        return _Entry(name, "secret")
    return _Entry(name, "file", info.st_size, "" if is_inside else str(real))


def _check_size(root: Path, entries: list[_Entry], limit_mib: int, fix: str) -> None:
    total = sum(e.size for e in entries)
    if total <= limit_mib * _MIB:
        return
    largest = sorted(entries, key=lambda e: e.size, reverse=True)[:5]
    listing = "".join(f"\n    {e.size / _MIB:8.1f} MiB  {e.name}" for e in largest)
    raise ConfigError(
        f"the code in {root} is {total / _MIB:.1f} MiB, more than {limit_mib} MiB; the largest files:{listing}",
        fix=f"{fix}, or raise --snapshot-limit-mib",
    )


def grant_group_access(target: Path, group_bits: int) -> None:
    """Give the folders below ``target`` the group permissions ``group_bits``, and files at most these permissions."""
    for folder, _, files in os.walk(target):
        Path(folder).chmod(0o700 | group_bits)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & (0o700 | group_bits) | stat.S_IRUSR)


def _copy_entry(root: Path, entry: _Entry, scratch: Path) -> None:
    if entry.kind == "secret":
        return
    source, target = root / entry.name, scratch / entry.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.kind == "file":
        # Not copy2: it also copies the setuid bit and extended attributes.
        shutil.copyfile(source, target)
        info = source.stat()
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
        target.chmod(info.st_mode & 0o777)
    else:
        target.symlink_to(entry.target)

"""Checks that a folder can be written and is on a filesystem that compute nodes can see.

Only the type of the filesystem is checked here. The agents check at each start that every node sees the run folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from clustertrain.errors import ConfigError

# Stored in the memory of one machine or in one container.
_PRIVATE = frozenset({"tmpfs", "ramfs", "overlay", "aufs", "squashfs", "devtmpfs"})
# Disks of one machine: usable on a one-machine cluster, and if this machine exports the folder.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "vfat", "exfat"})
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "wekafs", "pvfs2", "cvmfs", "afs", "panfs")
_MOUNTINFO = Path("/proc/self/mountinfo")


def find_filesystem_type(path: Path, mountinfo: str) -> str:
    """Return the type of the filesystem that holds ``path``, from the text of /proc/self/mountinfo; "" if not found."""
    best_length, filesystem_type = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        # mountinfo writes spaces, tabs, line breaks and backslashes in octal.
        mount = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        # A later mount on the same point hides the earlier one.
        if _is_inside(path, mount) and len(mount) >= best_length:
            best_length, filesystem_type = len(mount), after.split(" ")[0]
    return filesystem_type


def _is_inside(path: Path, mount: str) -> bool:
    return mount == "/" or str(path) == mount or str(path).startswith(mount.rstrip("/") + "/")


def check_folder(path: Path, setting: str, *, shared: bool) -> str | None:
    """Return a warning about the folder ``path``, or None. It need not exist; if ``shared``, other nodes must see it.

    Raises:
        ConfigError: the folder cannot be written, or is on a filesystem that only this machine sees.
    """
    existing = _nearest_existing(path)
    fix = f"set {setting} to a folder that you can write"
    if not existing.is_dir():
        raise ConfigError(f"{setting} = {path}: {existing} is a file, not a folder", fix=fix)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting} = {path}: {existing} is not writable", fix=fix)
    if not shared:
        return None
    try:
        filesystem_type = find_filesystem_type(existing.resolve(), _MOUNTINFO.read_text(errors="surrogateescape"))
    except OSError:
        return None  # no /proc: the agents check
    if filesystem_type in _PRIVATE:
        raise ConfigError(
            f"{setting} = {path} is on {filesystem_type}, which compute nodes do not see",
            fix=f"set {setting} to a folder on a filesystem that all nodes see (NFS, Lustre, GPFS, …)",
        )
    if filesystem_type in _LOCAL:
        return (
            f"{setting} = {path} is on a local disk ({filesystem_type}); the run fails at start on nodes that do"
            " not see it"
        )
    return None


def find_type(path: Path) -> str:
    """Return the type of the filesystem of ``path``, which need not exist; "" if unknown."""
    try:
        mounts = _MOUNTINFO.read_text(errors="surrogateescape")
    except OSError:  # no /proc
        return ""
    return find_filesystem_type(_nearest_existing(path).resolve(), mounts)


def is_local(filesystem_type: str) -> bool:
    """Return whether only this machine sees such a filesystem, unless it exports it."""
    return filesystem_type in _LOCAL | _PRIVATE


def find_shared_filesystem_type(path: Path) -> str:
    """Return the type of the network filesystem that holds ``path``, which need not exist; "" for a local disk.

    Also "" if unknown, as on a login node whose root is on the network.
    """
    try:
        mounts = _MOUNTINFO.read_text(errors="surrogateescape")
    except OSError:
        return ""
    filesystem_type = find_filesystem_type(_nearest_existing(path).resolve(), mounts)
    return (
        filesystem_type
        if filesystem_type.startswith(_SHARED) and not find_filesystem_type(Path("/"), mounts).startswith(_SHARED)
        else ""
    )


def _nearest_existing(path: Path) -> Path:
    """Return ``path`` or its nearest existing ancestor."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path

"""record.json: what the run was made from. Nothing here is needed to run it."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clustertrain
from clustertrain import clock, proc
from clustertrain.errors import CommandFailed

DIFF_LIMIT_BYTES = 1024 * 1024
_PACKAGES = ("torch", "numpy", "submitit", "torchsnapshot", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def collect(argv: Sequence[str], cwd: Path, repository: Path | None) -> dict[str, Any]:
    """The record of a submission; ``repository`` is the git repository of the user's code, or None."""
    return {
        "time": clock.now(),
        "user": _user(),
        "host": socket.gethostname(),
        "cwd": str(cwd),
        "argv": list(argv),
        "clustertrain": clustertrain.__version__,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "kernel": " ".join(os.uname()[i] for i in (0, 2, 4)),
        "packages": packages(),
        "git": git_state(repository) if repository is not None else None,
    }


def packages() -> dict[str, str]:
    """Versions by the names of the installed metadata's folders. Nothing is imported, and importlib.metadata, which
    would read the same with an e-mail parser, costs a tenth of a submission."""
    wanted = {name.replace("-", "_"): name for name in _PACKAGES}
    found: dict[str, str] = {}
    for folder in sys.path:
        for entry in _entries(folder):
            name, _, version = entry.removesuffix(".dist-info").partition("-")
            if entry.endswith(".dist-info") and name.lower() in wanted:
                found.setdefault(wanted[name.lower()], version)
    return found


def _entries(folder: str) -> list[str]:
    """What is in it; nothing where it is no folder (a zip, say) or closed to us."""
    try:
        return [entry.name for entry in os.scandir(folder)] if folder else []
    except OSError:
        return []


def git_state(repository: Path) -> dict[str, Any] | None:
    """Commit, branch, whether there were changes, and the changes to tracked files, up to 1 MiB of them. None without
    git or without a commit."""
    try:
        commit = _git(repository, "rev-parse", "HEAD").strip()
        branch = _git(repository, "rev-parse", "--abbrev-ref", "HEAD").strip()
        status = _git(repository, "--no-optional-locks", "status", "--porcelain")
        diff = _git(repository, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") if status else ""
    except CommandFailed:
        return None
    # Cut in bytes, and not inside of a character.
    kept = diff.encode()[:DIFF_LIMIT_BYTES].decode(errors="ignore")
    return {
        "repository": str(repository),
        "commit": commit,
        "branch": branch,
        "dirty": bool(status),
        "diff": kept,
        "diff_cut": len(kept) < len(diff),
    }


def _git(repository: Path, *argv: str) -> str:
    return proc.run(["git", "-C", repository, *argv]).stdout


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        return str(os.getuid())

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
from clustertrain import clock
from clustertrain.errors import CommandFailed
from clustertrain.submit import git
from clustertrain.submit.secret_files import looks_secret

DIFF_LIMIT_BYTES = 1024 * 1024
_WITH_SECRETS = ("--env", "--set")
# Of submodules their commit alone: git would start a git in each to look at its files.
_SHALLOW = ("--ignore-submodules=dirty",)
_PACKAGES = ("torch", "numpy", "submitit", "torchsnapshot", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def collect(argv: Sequence[str], cwd: Path, repository: Path | None) -> dict[str, Any]:
    """The record of a submission; ``repository`` is the root of the user's code if that is a git repository."""
    return {
        "time": clock.now(),
        "user": _user(),
        "host": socket.gethostname(),
        "cwd": str(cwd),
        "argv": without_values(argv),
        "clustertrain": clustertrain.__version__,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "kernel": " ".join(os.uname()[i] for i in (0, 2, 4)),
        "packages": packages(),
        "git": git_state(repository) if repository is not None else None,
    }


def without_values(argv: Sequence[str]) -> list[str]:
    """``argv`` without the values of --env, nor a webhook: they may be secrets, and the record is open to the group."""
    kept, option = [], ""
    for word in argv:
        joined = next((f"{name}=" for name in _WITH_SECRETS if word.startswith(f"{name}=")), "")
        pair = word.removeprefix(joined) if joined or option in _WITH_SECRETS else ""
        key, sign, _ = pair.partition("=")
        secret = sign and ("--env" in (option, joined.rstrip("=")) or "webhook" in pair)
        kept.append(f"{joined}{key}=***" if secret else word)
        option = word
    return kept


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
    """Commit, branch, whether there were changes, and the changes to tracked files that do not look like secrets, up to
    1 MiB of them. None without git or without a commit."""
    try:
        commit = git.run(repository, "rev-parse", "HEAD").stdout.strip()
        branch = git.run(repository, "rev-parse", "--abbrev-ref", "HEAD").stdout.strip()
        settings = git.without_filters(repository)
        status = git.run(repository, "status", "--porcelain", *_SHALLOW, settings=settings).stdout
        diff = _diff(repository, settings) if status else ""
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


def _diff(repository: Path, settings: Sequence[str]) -> str:
    plain = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--submodule=short", *_SHALLOW)
    names = git.run(repository, *plain, "--name-only", "-z", "HEAD", settings=settings).stdout.split("\0")
    without = [f":(top,exclude,literal){name}" for name in names if looks_secret(name)]
    return git.run(repository, *plain, "HEAD", "--", ":(top)", *without, settings=settings).stdout


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        return str(os.getuid())

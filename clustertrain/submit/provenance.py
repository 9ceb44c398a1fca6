"""record.json: the code, the command line and the machine of a submission. Only readers use it, not the run."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clustertrain
from clustertrain import clock
from clustertrain.errors import CommandFailed
from clustertrain.run.rank_python import list_packages
from clustertrain.settings import user_name
from clustertrain.submit.snapshot import git
from clustertrain.submit.snapshot.secret_files import is_likely_secret

DIFF_LIMIT_BYTES = 1024 * 1024
_SECRET_OPTIONS = ("--env", "--set")
# Compare only the commits of submodules: to compare files, git would start a process in each.
_SKIP_SUBMODULES = ("--ignore-submodules=dirty",)
_PACKAGES = ("torch", "numpy", "submitit", "torchsnapshot", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def collect(argv: Sequence[str], cwd: Path, repository: Path | None) -> dict[str, Any]:
    """Return the record of a submission. ``repository`` is the root of the user's code if it is a git repository."""
    return {
        "time": clock.now(),
        "user": user_name(),
        "host": socket.gethostname(),
        "cwd": str(cwd),
        "argv": redact_argv(argv),
        "clustertrain": clustertrain.__version__,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "kernel": " ".join(os.uname()[i] for i in (0, 2, 4)),
        "packages": list_packages(sys.path, _PACKAGES),
        "git": read_git_state(repository) if repository is not None else None,
    }


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` without values of --env and webhooks: they may be secrets, and the group may read the record."""
    redacted, option = [], ""
    for arg in argv:
        joined = next((f"{name}=" for name in _SECRET_OPTIONS if arg.startswith(f"{name}=")), "")
        assignment = arg.removeprefix(joined) if joined or option in _SECRET_OPTIONS else ""
        key, sign, _ = assignment.partition("=")
        secret = sign and ("--env" in (option, joined.rstrip("=")) or "webhook" in assignment)
        redacted.append(f"{joined}{key}=***" if secret else arg)
        option = arg
    return redacted


def read_git_state(repository: Path) -> dict[str, Any] | None:
    """Return the state of a git repository; None without git or without a commit.

    It has the commit, the branch, whether files changed, and up to 1 MiB of the diff of tracked files that do not look
    like secrets.
    """
    try:
        commit = git.run(repository, "rev-parse", "HEAD").stdout.strip()
        branch = git.run(repository, "rev-parse", "--abbrev-ref", "HEAD").stdout.strip()
        settings = git.list_filter_overrides(repository)
        status = git.run(repository, "status", "--porcelain", *_SKIP_SUBMODULES, settings=settings).stdout
        diff = _diff(repository, settings) if status else ""
    except CommandFailed:
        return None
    # Cut at a byte limit, but not inside a character.
    truncated = diff.encode()[:DIFF_LIMIT_BYTES].decode(errors="ignore")
    return {
        "repository": str(repository),
        "commit": commit,
        "branch": branch,
        "dirty": bool(status),
        "diff": truncated,
        "diff_truncated": len(truncated) < len(diff),
    }


def _diff(repository: Path, settings: Sequence[str]) -> str:
    base_args = (
        "diff",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--no-renames",
        "--submodule=short",
        *_SKIP_SUBMODULES,
    )
    names = git.run(repository, *base_args, "--name-only", "-z", "HEAD", settings=settings).stdout.split("\0")
    exclusions = [f":(top,exclude,literal){name}" for name in names if is_likely_secret(name)]
    return git.run(repository, *base_args, "HEAD", "--", ":(top)", *exclusions, settings=settings).stdout

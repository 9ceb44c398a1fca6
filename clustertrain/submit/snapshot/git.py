"""The only calls to git, all of which are read-only.

Another user may have prepared the repository, and its configuration can name programs for git to run. These calls run
none of them and fetch nothing (docs/decisions/0037).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clustertrain import proc
from clustertrain.errors import CommandFailed

_OVERRIDES = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "core.sshCommand=false", "core.pager=cat")
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "",  # git would fetch the missing objects of a partial clone
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",  # its messages are parsed
}


def run(folder: Path, *argv: str, settings: Sequence[str] = (), check: bool = True) -> proc.CommandResult:
    """Run ``git ARGV`` in ``folder`` with ``settings`` (``KEY=VALUE``) and those that prevent it from running programs.

    Raises:
        CommandFailed: as :func:`clustertrain.proc.run`.
    """
    config_args = [arg for setting in (*_OVERRIDES, *settings) for arg in ("-c", setting)]
    return proc.run(["git", "-C", folder, *config_args, *argv], env={**os.environ, **_ENVIRONMENT}, check=check)


def list_filter_overrides(repository: Path) -> list[str]:
    """Return settings that disable the filters defined by the repository.

    Commands that compare files with the index need them, because they run the clean filter of each file. Filters of
    the user or the system, such as Git LFS, remain enabled.

    Raises:
        CommandFailed: git cannot report where a filter is defined, or a filter cannot be disabled.
    """
    result = run(repository, "config", "-z", "--show-scope", "--get-regexp", r"^filter\.", check=False)
    if result.returncode == 1:  # no filters
        return []
    if result.returncode:
        raise CommandFailed(f"git cannot list the filters of {repository}: {result.stderr.strip()}")
    fields = result.stdout.split("\0")[:-1]
    trusted: dict[str, str] = {}
    repository_keys: list[str] = []
    for scope, entry in zip(fields[::2], fields[1::2], strict=True):
        key, _, value = entry.partition("\n")
        if scope in ("local", "worktree"):
            repository_keys.append(key)
        else:
            trusted[key] = value
    if any("=" in key or "\ufffd" in key for key in repository_keys):  # -c would set another key
        raise CommandFailed(f"a filter of {repository} has a name that cannot be disabled")
    return [f"{key}={trusted.get(key, 'false' if key.endswith('.required') else '')}" for key in repository_keys]

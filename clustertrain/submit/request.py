"""The request: the user's command, before any file is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from clustertrain.submit.snapshot.code_snapshot import DEFAULT_LIMIT_MIB

CountMode = Literal["no", "yes", "trace"]


@dataclass(frozen=True)
class SubmitRequest:
    target: str = ""
    """A recipe (``*.toml``), a script, or empty for the default preset."""
    args: tuple[str, ...] = ()
    """Arguments of the script."""
    command: tuple[str, ...] = ()
    """A program of any kind with its arguments, instead of a target."""
    local_rank_index: int | None = None
    """Which element of ``command`` is an option that gets the local rank of each rank."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Options on the command line, by their names in JobSpec."""
    assignments: tuple[str, ...] = ()
    """Arguments of ``--set``."""
    sweep_values: Mapping[str, Any] = field(default_factory=dict)
    """Values of this run of a sweep, by recipe key."""
    env: Mapping[str, str] = field(default_factory=dict)
    snapshot_limit_mib: int = DEFAULT_LIMIT_MIB
    snapshot_include: tuple[str, ...] = ()
    count_mode: CountMode = "no"
    """Whether a user-defined model is counted before the plan; ``trace`` also traces a step of it."""
    wrapped: bool = False
    """The command runs inside the user's own batch script."""
    argv: tuple[str, ...] = ()
    cwd: Path = field(default_factory=Path.cwd)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

"""Documents of the smaller tools: ``recipe explain``, ``diagnose``, ``data``, ``track`` and ``version``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class RecipeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key of a recipe."""

    key: str
    """Dotted name, as `--set` takes it."""
    type: str
    """Type of the TOML value, such as `integer` or `list of strings`."""
    default: str
    """The default as TOML; `required` or `unset` without one."""
    allowed: str
    """Range or choices; empty if every value of the type is allowed."""
    description: str
    """What the key does."""


class RecipeKeys(msgspec.Struct, frozen=True, kw_only=True):
    """One key, or all keys of a table."""

    keys: tuple[RecipeKey, ...]
    """The key, or the keys of the table in its order."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str
    """Name of the check."""
    verdict: Literal["pass", "warn", "fail", "skipped"]
    """`pass`, `warn`, `fail`, or `skipped` if the check does not apply."""
    evidence: dict[str, Any]
    """Every measured number, with the unit in its key."""
    text: str
    """The reason for the verdict, in one sentence."""
    fix: str
    """What to do; empty if there is nothing to do."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all requested checks of a recipe."""

    recipe: str
    """Path of the recipe."""
    device: str
    """The GPU's model name, or `cpu`."""
    checks: tuple[CheckResult, ...]
    """One entry per check that was requested, in the order of the checks."""
    verdict: Literal["pass", "warn", "fail", "skipped"]
    """The worst verdict of `checks`."""


class CheckNames(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of `diagnose`."""

    checks: dict[str, str]
    """What each check does, by name."""


class TokenShards(msgspec.Struct, frozen=True, kw_only=True):
    """Token shards that were written."""

    folder: str
    """Folder of the shards."""
    shards: int
    """Number of shards."""
    tokens: int
    """Number of tokens in all shards."""
    max_token_id: int | None
    """The largest token; null if there is none."""


class TrackerUpload(msgspec.Struct, frozen=True, kw_only=True):
    """The upload to one tracker."""

    step: int
    """The last step that the tracker has; -1 if none."""
    error: str | None
    """Why the upload failed; null if it succeeded."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a run that were uploaded."""

    run: str
    """Id of the run."""
    trackers: dict[str, TrackerUpload]
    """The upload to each tracker, by name of the tracker."""


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """What a bug report needs."""

    clustertrain: str | None
    """Version of clustertrain; null if it is not installed as a package."""
    python: str
    """Version and interpreter."""
    system: str
    """Operating system and kernel."""
    cpus: int
    """CPUs that this process may use."""
    packages: dict[str, str | None]
    """Version by package; null if it is not installed."""
    slurm: str | None
    """Version of Slurm; null if it is not installed."""
    gpus: str | None
    """GPUs of this machine and the driver; null if there are none."""
    home: str
    """The folder of the runs."""
    home_filesystem: str | None
    """Type of its filesystem, such as `nfs4`; null if unknown. Compute nodes do not see a disk of this machine."""
    profile: str | None
    """Name of the default cluster profile; null if there is none."""

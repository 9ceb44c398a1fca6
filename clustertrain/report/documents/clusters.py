"""Documents about cluster profiles."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain.config.cluster import ClusterProfile


class ProfileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster profile."""

    name: str
    """Name of the profile, as --cluster takes it."""
    path: str
    """Its TOML file."""
    default: bool
    """It is used if a job names no profile."""


class ProfileList(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster profiles, by name."""

    profiles: tuple[ProfileEntry, ...]
    """One entry per profile."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster profile with all keys, defaults included."""

    name: str
    """Name of the profile."""
    path: str
    """Its TOML file."""
    profile: ClusterProfile
    """Its keys and values."""


class DetectedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A detected value."""

    value: Any
    """The value, as the profile has it."""
    source: str
    """Where it comes from."""


class ProfileConflict(msgspec.Struct, frozen=True, kw_only=True):
    """A key whose value in the profile differs from the detected one."""

    profile: Any
    """The value in the profile, which is kept."""
    detected: Any
    """The value that was detected."""


class DetectedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What `cluster detect` found, and what it changed."""

    name: str
    """Name of the profile."""
    path: str
    """Its TOML file, which --dry-run does not write."""
    written: bool
    """The file was written."""
    changed: tuple[str, ...]
    """Keys that were changed or, with --dry-run, would be."""
    detected: dict[str, DetectedKey]
    """What was detected, by dotted key of the profile."""
    conflicts: dict[str, ProfileConflict]
    """Keys that keep their value, by name."""
    measured: Any
    """Measured rates; null if nothing was measured."""
    notes: tuple[str, ...]
    """What a person should know about the detected values, such as other GPU types of the partition."""
    failures: tuple[str, ...]
    """Measurements that failed."""
    profile: ClusterProfile
    """The resulting profile with all keys, defaults included."""

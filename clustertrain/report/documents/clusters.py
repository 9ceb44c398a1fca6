"""Documents about cluster profiles."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain.config.cluster import ClusterProfile


class ProfileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster profile."""

    name: str
    path: str
    default: bool
    """It is used if a job names no profile."""


class ProfileList(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster profiles, by name."""

    profiles: tuple[ProfileEntry, ...]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster profile with all keys, defaults included."""

    name: str
    path: str
    profile: ClusterProfile


class DetectedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A detected value."""

    value: Any
    source: str
    """Where it comes from."""


class ProfileConflict(msgspec.Struct, frozen=True, kw_only=True):
    """A key whose value in the profile differs from the detected one."""

    profile: Any
    detected: Any


class DetectedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What `cluster detect` found, and what it changed."""

    name: str
    path: str
    written: bool
    """The file was written."""
    changed: tuple[str, ...]
    """Keys that were changed or, with --dry-run, would be."""
    detected: dict[str, DetectedKey]
    conflicts: dict[str, ProfileConflict]
    """Keys that keep their value, by name."""
    measured: Any
    """Measured rates; null if nothing was measured."""
    notes: tuple[str, ...]
    failures: tuple[str, ...]
    """Measurements that failed."""
    profile: ClusterProfile

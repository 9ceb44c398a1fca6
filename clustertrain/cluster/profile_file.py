"""Edit the text of a cluster profile for ``cluster detect``, preserving user-written values and comments."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tomlkit

from clustertrain import fsio
from clustertrain.cluster.slurm_site_profile import DetectedValue
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.parsing.documents import build, parse_toml
from clustertrain.errors import ConfigError, UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class KeyConflict:
    """A key that keeps its value in the profile although another one was detected."""

    key: str
    in_profile: Any
    detected: Any


@dataclass(frozen=True)
class MergeResult:
    """A merged profile."""

    text: str
    """The whole profile."""
    written: tuple[str, ...]
    """New or changed keys and tables."""
    conflicts: tuple[KeyConflict, ...]


def merge(
    text: str | None,
    detected: Mapping[str, DetectedValue],
    tables: Mapping[str, msgspec.Struct | None],
    *,
    header: Sequence[str] = (),
    force: bool = False,
) -> MergeResult:
    """Merge ``detected`` and ``tables`` into the profile ``text``, or into a new one with ``header`` if it is None.

    Existing keys with another value are kept unless ``force``. ``tables`` are always replaced, because only detect
    writes them.
    """
    document = tomlkit.document() if text is None else tomlkit.parse(text)
    if text is None:
        for line in header:
            document.add(tomlkit.comment(_one_line(line)))
    written, conflicts = [], []
    for key, entry in detected.items():
        if key in document and document[key] == entry.value:
            continue
        if key in document and not force:
            conflicts.append(KeyConflict(key, document.unwrap()[key], entry.value))
            continue
        item = tomlkit.item(entry.value)
        item.comment(_one_line(entry.source))
        document[key] = item
        written.append(key)
    for name, struct in tables.items():
        if struct is not None and document.unwrap().get(name) != _without_none(struct):
            document[name] = tomlkit.item(_without_none(struct))
            written.append(name)
    return MergeResult(tomlkit.dumps(document), tuple(written), tuple(conflicts))


def carry_over_fabric_rate(old: MeasuredRates | None, new: MeasuredRates) -> MeasuredRates:
    """Return ``new``, with the inter-node rate of ``old`` if it has none and the device is the same.

    A later measurement on one node must not discard the rate.
    """
    if old is None or new.fabric_bus_gb_s is not None or old.fabric_bus_gb_s is None or old.device != new.device:
        return new
    return msgspec.structs.replace(new, fabric_bus_gb_s=old.fabric_bus_gb_s, nodes=old.nodes)


def check_name(name: str) -> str:
    """Return ``name``; raise UsageError if it is not the name of a profile."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"invalid profile name {name!r}", fix="use letters, digits, '-', '_' and '.'")
    return name


def parse_profile(text: str, source: str) -> ClusterProfile:
    """Parse a profile; raise ConfigError if ``text`` is not one. ``source`` names it in messages."""
    return build(parse_toml(text, source), ClusterProfile, source)


def write(path: Path, text: str) -> None:
    """Write the profile durably, keeping its permissions and symbolic links."""
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        fsio.write_text(target, text)
    except OSError as e:
        fix = "set XDG_CONFIG_HOME to a writable folder, or only print the profile"
        raise ConfigError(f"the profile {path} cannot be written: {e.strerror}", fix=fix) from e
    if mode is not None:
        target.chmod(mode)


def format_header(notes: Sequence[str], now: float) -> list[str]:
    """Return the header comments of a new profile."""
    day = time.strftime("%Y-%m-%d", time.gmtime(now))
    return [
        f"Written by `clustertrain cluster detect` on {day}. Edit as needed: detect keeps your changes.",
        *notes,
    ]


def _without_none(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of ``struct`` that are not None, because TOML has no null."""
    return {key: value for key, value in msgspec.to_builtins(struct).items() if value is not None}


def _one_line(text: str) -> str:
    """Return ``text`` with blanks instead of control characters, which would end a comment or make the file invalid."""
    return "".join(c if c.isprintable() else " " for c in text)

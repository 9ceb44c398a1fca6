"""The text of a cluster profile: what ``cluster detect`` adds to it. What a person wrote stays, comments and all."""

from __future__ import annotations

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
from clustertrain.errors import ConfigError


@dataclass(frozen=True)
class KeyConflict:
    """A key whose value in the profile is not the one that was found, and stays."""

    key: str
    in_profile: Any
    detected: Any


@dataclass(frozen=True)
class MergeResult:
    """``text`` is the whole profile; ``written`` names the keys and tables that are new or changed in it."""

    text: str
    written: tuple[str, ...]
    conflicts: tuple[KeyConflict, ...]


def merge(
    text: str | None,
    detected: Mapping[str, DetectedValue],
    tables: Mapping[str, msgspec.Struct | None],
    *,
    header: Sequence[str] = (),
    force: bool = False,
) -> MergeResult:
    """``detected`` and ``tables`` put into the profile ``text``, or with None into a new one that begins with
    ``format_header``.

    A key that is there with another value stays, unless ``force``. ``tables`` are written by detect alone and replaced.
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
    """``new``, with the rate across nodes of an earlier measurement of the same device where it has none: most people
    measure on one node more often than on two."""
    if old is None or new.fabric_bus_gb_s is not None or old.fabric_bus_gb_s is None or old.device != new.device:
        return new
    return msgspec.structs.replace(new, fabric_bus_gb_s=old.fabric_bus_gb_s, nodes=old.nodes)


def parse_profile(text: str, source: str) -> ClusterProfile:
    """Raises ConfigError where ``text`` is not a profile."""
    return build(parse_toml(text, source), ClusterProfile, source)


def write(path: Path, text: str) -> None:
    """Durably; a profile that others read keeps its permissions, and a link stays one."""
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        fsio.write_text(target, text)
    except OSError as e:
        fix = "set XDG_CONFIG_HOME to a folder of yours, or print it with --dry-run"
        raise ConfigError(f"the profile {path} cannot be written: {e.strerror}", fix=fix) from e
    if mode is not None:
        target.chmod(mode)


def format_header(notes: Sequence[str], now: float) -> list[str]:
    """The first lines of a new profile."""
    day = time.strftime("%Y-%m-%d", time.gmtime(now))
    return [
        f"Written by `clustertrain cluster detect` on {day}. Change what you like: detect keeps what it finds changed.",
        *notes,
    ]


def _without_none(struct: msgspec.Struct) -> dict[str, Any]:
    """TOML has no null."""
    return {key: value for key, value in msgspec.to_builtins(struct).items() if value is not None}


def _one_line(text: str) -> str:
    """Control characters would end a comment, or the file."""
    return "".join(c if c.isprintable() else " " for c in text)

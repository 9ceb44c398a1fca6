"""Checks of values, for the ``__post_init__`` of the structs in this package."""

from __future__ import annotations

import ipaddress
import re

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
MAX_ENTRY_BYTES = 250  # as a module is a file, whose name takes 255 bytes with its ending
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def check_positive(name: str, value: float) -> None:
    if not value > 0:  # nor is nan
        raise ValueError(f"{name} = {value}: must be greater than 0")


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} = {value}: must lie between {low:g} and {high:g}")


def check_entry(entry: str) -> None:
    """Raises ValueError where ``entry`` is no ``package.module:function``."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", entry):
        raise ValueError(f"entry = {entry!r}: must be of the form package.module:function")
    if len(entry.encode()) > MAX_ENTRY_BYTES:
        raise ValueError(f"entry = {entry[:80]!r}…: has {len(entry.encode())} bytes, at most {MAX_ENTRY_BYTES}")


def is_host(text: str) -> bool:
    """Whether it has the form of a host's name, or of an address of IPv4 or IPv6 (without brackets)."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True

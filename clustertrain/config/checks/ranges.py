"""Checks of values for the ``__post_init__`` of the structs in ``clustertrain.config``."""

from __future__ import annotations

import ipaddress
import re

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
MAX_ENTRY_BYTES = 250  # a file name has at most 255 bytes, including the suffix .py
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is greater than 0."""
    if not value > 0:  # also rejects NaN
        raise ValueError(f"{name} = {value}: must be greater than 0")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless ``value`` is between ``low`` and ``high``, both included."""
    if not low <= value <= high:
        raise ValueError(f"{name} = {value}: must lie between {low:g} and {high:g}")


def check_entry(entry: str) -> None:
    """Raise ValueError unless ``entry`` has the form ``package.module:function``."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", entry):
        raise ValueError(f"entry = {entry!r}: must be of the form package.module:function")
    if len(entry.encode()) > MAX_ENTRY_BYTES:
        raise ValueError(f"entry = {entry[:80]!r}…: has {len(entry.encode())} bytes, at most {MAX_ENTRY_BYTES}")


def is_host(text: str) -> bool:
    """Return whether ``text`` has the form of a host name, an IPv4 address or an IPv6 address without brackets."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True

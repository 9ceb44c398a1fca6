"""The JSON files of a run for those who only read it: what was damaged, or is of another version or another hand, is
left out and told, so that one such file does not hide the rest of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from clustertrain import reading

MOST = 2.0**63
_NAMES = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a bool", type(None): "null"}


class Document(NamedTuple):
    """``trouble``: in words that name the file, what is wrong with it; None also where it is missing or empty, as
    readers beat a rename on NFS."""

    value: dict[str, Any]
    trouble: str | None = None


def read(path: Path, kinds: Mapping[str, type] | None = None) -> Document:
    """The JSON object in ``path``, without those of its fields that are not of the kind that ``kinds`` asks for.

    Raises:
        PermissionError: it may not be read.
    """
    try:
        text = reading.read_text(path)
        found = reading.parse(text) if text.strip() else {}
    except FileNotFoundError:
        return Document({})
    except PermissionError:
        raise
    except OSError as e:
        return Document({}, f"{path}: {e.strerror or e}")
    except ValueError as e:
        return Document({}, f"{path}: is not JSON: {e}")
    if not isinstance(found, dict):
        return Document({}, f"{path}: holds {_NAMES[type(found)]}, not an object")
    odd = [name for name, kind in (kinds or {}).items() if name in found and not is_a(found[name], kind)]
    value = {k: v for k, v in found.items() if k not in odd}
    return Document(value, f"{path}: not what it should be: {', '.join(odd)}" if odd else None)


def peek(path: Path) -> dict[str, Any]:
    """:func:`read` for polling a file that others may write at any moment: empty whatever goes wrong."""
    try:
        return read(path).value
    except OSError:
        return {}


def is_number(value: object) -> TypeGuard[float]:
    """Finite and within 64 bits, so that it can be reckoned with; True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST


def is_a(value: object, kind: type) -> bool:
    """Whether a field is of a kind; ``float`` stands for all numbers."""
    return is_number(value) if kind is float else isinstance(value, kind)

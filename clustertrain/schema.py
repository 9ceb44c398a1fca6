"""Typed data from JSON and from builtins, safe in threads.

msgspec builds what it knows of a type when the type is first used. Two threads that use it first at the same moment
crash the process (msgspec 0.22), so that every use of a type goes through here.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_building = threading.Lock()
# A process forked while another thread builds one would wait for that thread for ever.
os.register_at_fork(after_in_child=_building._at_fork_reinit)  # type: ignore[attr-defined]


@overload
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...


@overload
def decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...  # a union, which is no type to a type checker


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON of a type, built once."""
    found = _decoders.get(kind)
    if found is None:
        with _building:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


@overload
def decode(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T: ...


@overload
def decode(data: bytes | bytearray | memoryview | str, kind: Any) -> Any: ...


def decode(data: bytes | bytearray | memoryview | str, kind: Any) -> Any:
    """JSON as a ``kind``.

    Raises:
        msgspec.DecodeError: anything else, also what is nested too deep.
    """
    try:
        return decoder(kind).decode(data)
    except RecursionError:
        raise msgspec.DecodeError("nested too deep") from None
    except UnicodeDecodeError as e:
        raise msgspec.DecodeError(f"not UTF-8: {e.reason}") from None


def convert(value: Any, kind: type[T]) -> T:
    """Builtins as a ``kind``.

    Raises:
        msgspec.ValidationError: a key that is missing, a value of another type.
    """
    decoder(kind)
    return msgspec.convert(value, type=kind)

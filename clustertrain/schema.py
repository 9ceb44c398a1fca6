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
_build_lock = threading.Lock()
# A process forked while another thread builds one would wait for that thread for ever.
os.register_at_fork(after_in_child=_build_lock._at_fork_reinit)  # type: ignore[attr-defined]


@overload
def get_decoder(target_type: type[T]) -> msgspec.json.Decoder[T]: ...


@overload
def get_decoder(target_type: Any) -> msgspec.json.Decoder[Any]: ...  # a union, which is no type to a type checker


def get_decoder(target_type: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON of a type, built once."""
    cached = _decoders.get(target_type)
    if cached is None:
        with _build_lock:
            cached = _decoders.setdefault(target_type, msgspec.json.Decoder(target_type))
    return cached


@overload
def decode(data: bytes | bytearray | memoryview | str, target_type: type[T]) -> T: ...


@overload
def decode(data: bytes | bytearray | memoryview | str, target_type: Any) -> Any: ...


def decode(data: bytes | bytearray | memoryview | str, target_type: Any) -> Any:
    """JSON as a ``target_type``.

    Raises:
        msgspec.DecodeError: anything else, also what is nested too deep.
    """
    try:
        return get_decoder(target_type).decode(data)
    except RecursionError:
        raise msgspec.DecodeError("nested too deep") from None
    except UnicodeDecodeError as e:
        raise msgspec.DecodeError(f"not UTF-8: {e.reason}") from None


def convert(value: Any, target_type: type[T]) -> T:
    """Builtins as a ``target_type``.

    Raises:
        msgspec.ValidationError: a key that is missing, a value of another type.
    """
    get_decoder(target_type)
    return msgspec.convert(value, type=target_type)

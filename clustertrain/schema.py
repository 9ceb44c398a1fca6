"""Thread-safe conversion of JSON and builtins to typed data.

msgspec builds its information about a type when the type is first used. If two threads do this at the same moment, the
process crashes (msgspec 0.22), so all conversions use these functions.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_build_lock = threading.Lock()
# Otherwise a process that is forked while another thread holds the lock would wait for it forever.
os.register_at_fork(after_in_child=_build_lock._at_fork_reinit)  # type: ignore[attr-defined]


@overload
def get_decoder(target_type: type[T]) -> msgspec.json.Decoder[T]: ...


@overload
def get_decoder(target_type: Any) -> msgspec.json.Decoder[Any]: ...  # a union is not a type[T] for type checkers


def get_decoder(target_type: Any) -> msgspec.json.Decoder[Any]:
    """Return the JSON decoder of a type, which is built once."""
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
    """Decode JSON as ``target_type``.

    Raises:
        msgspec.DecodeError: ``data`` is not JSON, not a ``target_type``, or nested too deep.
    """
    try:
        return get_decoder(target_type).decode(data)
    except RecursionError:
        raise msgspec.DecodeError("nested too deep") from None
    except UnicodeDecodeError as e:
        raise msgspec.DecodeError(f"not UTF-8: {e.reason}") from None


def convert(value: Any, target_type: type[T]) -> T:
    """Convert builtins to ``target_type``.

    Raises:
        msgspec.ValidationError: a key is missing, or a value has another type.
    """
    get_decoder(target_type)
    return msgspec.convert(value, type=target_type)

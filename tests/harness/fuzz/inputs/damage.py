"""Damage to bytes and to JSON documents."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.harness.fuzz.inputs.text import deep, values

SHAPES = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b"7",
    b'"words"',
    b"\0" * 64,
    b"\xff\xfe\xfd",
    b"\xef\xbb\xbf{}",
    b'{"a": 1',
    deep(100_000).encode(),
    deep(5_000, '{"a":', "}").encode(),
    b"9" * 5_000,
    b'{"t": 1e999, "step": -1}',
    b'{"t": NaN}',
)


def byte_changes() -> SearchStrategy[tuple[str, Any]]:
    """Draw a change of bytes for :func:`change`."""
    place = st.integers(0, 1 << 16)
    return st.one_of(
        st.tuples(st.just("whole"), st.sampled_from(SHAPES)),
        st.tuples(st.just("cut"), place),
        st.tuples(st.just("flip"), st.tuples(place, st.integers(0, 255))),
        st.tuples(st.just("insert"), st.tuples(place, st.binary(max_size=12))),
        st.tuples(st.just("repeat"), st.tuples(place, st.integers(2, 40))),
        st.tuples(st.just("end"), st.sampled_from(SHAPES)),
    )


def json_changes() -> SearchStrategy[tuple[str, Any]]:
    """Draw a change for :func:`change`: of a value in a JSON document, or in one line of a JSONL file, or of bytes."""
    value = st.tuples(st.just("value"), st.tuples(st.integers(0, 1 << 16), values()))
    removed = st.tuples(st.just("without"), st.integers(0, 1 << 16))
    return st.one_of(value, value, removed, byte_changes())


def change(data: bytes, operation: tuple[str, Any]) -> bytes:
    """Return ``data`` with one change of :func:`byte_changes` or :func:`json_changes`."""
    kind, argument = operation
    size = max(1, len(data))
    if kind == "whole":
        return bytes(argument)
    if kind == "cut":
        return data[: argument % size]
    if kind == "flip":
        position = argument[0] % size
        return data[:position] + bytes([argument[1]]) + data[position + 1 :]
    if kind == "insert":
        position = argument[0] % size
        return data[:position] + argument[1] + data[position:]
    if kind == "repeat":
        position = argument[0] % size
        return data[:position] + data[position : position + 100] * argument[1] + data[position:]
    if kind == "end":
        return data + bytes(argument) + b"\n"
    return _change_document(data, kind, argument)


def _change_document(data: bytes, kind: str, argument: Any) -> bytes:
    """Change a value in one line of JSONL, or in a single document; return anything else unchanged."""
    lines = data.splitlines(keepends=True) if data.count(b"}\n") > 1 and not data.startswith(b"{\n") else [data]
    place = argument[0] if kind == "value" else argument
    line = place % max(1, len(lines))
    try:
        document = json.loads(lines[line])
    except (ValueError, IndexError, RecursionError):
        return data
    paths = list(_paths(document))
    if not paths:
        return data
    path = paths[place // len(lines) % len(paths)]
    lines[line] = (
        json.dumps(_replace_value(document, path, kind, argument), ensure_ascii=bool(place % 2)).encode(
            "utf-8", "surrogatepass"
        )
        + b"\n"
    )
    return b"".join(lines)


def _paths(value: Any, parents: tuple[Any, ...] = ()) -> Any:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner_value in inner:
        yield (*parents, key)
        yield from _paths(inner_value, (*parents, key))


def _replace_value(document: Any, path: tuple[Any, ...], kind: str, argument: Any) -> Any:
    document = copy.deepcopy(document)
    container = document
    for part in path[:-1]:
        container = container[part]
    if kind == "without":
        del container[path[-1]]
    else:
        container[path[-1]] = argument[1]
    return document

"""Damage to bytes, and to documents of JSON."""

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


def bytes_changed() -> SearchStrategy[tuple[str, Any]]:
    """A change for :func:`change`, of bytes alone."""
    place = st.integers(0, 1 << 16)
    return st.one_of(
        st.tuples(st.just("whole"), st.sampled_from(SHAPES)),
        st.tuples(st.just("cut"), place),
        st.tuples(st.just("flip"), st.tuples(place, st.integers(0, 255))),
        st.tuples(st.just("insert"), st.tuples(place, st.binary(max_size=12))),
        st.tuples(st.just("repeat"), st.tuples(place, st.integers(2, 40))),
        st.tuples(st.just("end"), st.sampled_from(SHAPES)),
    )


def json_changed() -> SearchStrategy[tuple[str, Any]]:
    """A change for :func:`change`, of a value in a document or in a line of it."""
    value = st.tuples(st.just("value"), st.tuples(st.integers(0, 1 << 16), values()))
    gone = st.tuples(st.just("without"), st.integers(0, 1 << 16))
    return st.one_of(value, value, gone, bytes_changed())


def change(data: bytes, how: tuple[str, Any]) -> bytes:
    """``data`` with one change of :func:`bytes_changed` or :func:`json_changed`."""
    kind, what = how
    size = max(1, len(data))
    if kind == "whole":
        return bytes(what)
    if kind == "cut":
        return data[: what % size]
    if kind == "flip":
        at = what[0] % size
        return data[:at] + bytes([what[1]]) + data[at + 1 :]
    if kind == "insert":
        at = what[0] % size
        return data[:at] + what[1] + data[at:]
    if kind == "repeat":
        at = what[0] % size
        return data[:at] + data[at : at + 100] * what[1] + data[at:]
    if kind == "end":
        return data + bytes(what) + b"\n"
    return _document_changed(data, kind, what)


def _document_changed(data: bytes, kind: str, what: Any) -> bytes:
    """One line of a file of lines, else the whole document. What is no JSON stays as it is."""
    lines = data.splitlines(keepends=True) if data.count(b"}\n") > 1 and not data.startswith(b"{\n") else [data]
    place = what[0] if kind == "value" else what
    at = place % max(1, len(lines))
    try:
        document = json.loads(lines[at])
    except (ValueError, IndexError, RecursionError):
        return data
    paths = list(_paths(document))
    if not paths:
        return data
    path = paths[place // len(lines) % len(paths)]
    lines[at] = (
        json.dumps(_replaced(document, path, kind, what), ensure_ascii=bool(place % 2)).encode("utf-8", "surrogatepass")
        + b"\n"
    )
    return b"".join(lines)


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Any:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, of in inner:
        yield (*above, key)
        yield from _paths(of, (*above, key))


def _replaced(document: Any, path: tuple[Any, ...], kind: str, what: Any) -> Any:
    document = copy.deepcopy(document)
    at = document
    for part in path[:-1]:
        at = at[part]
    if kind == "without":
        del at[path[-1]]
    else:
        at[path[-1]] = what[1]
    return document

"""Writes token shards. Nothing here imports torch: a login node may lack it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from clustertrain import fsio
from clustertrain.errors import ConfigError
from clustertrain.spec.data import DataSpec
from clustertrain.spec.shards import BYTES, INDEX, Index, Shard, Width
from clustertrain.train.text_files import files

SHARD_TOKENS = 32 * 1024 * 1024  # of a shard, all of which are in memory while it is written
DocumentsAre = Literal["files", "lines", "jsonl"]

Array = np.ndarray[Any, np.dtype[Any]]


def write(
    folder: Path,
    documents: Iterable[Sequence[int] | Array],
    *,
    dtype: Width = "uint32",
    shard_tokens: int = SHARD_TOKENS,
    tokenizer: str = "",
) -> Index:
    """Write ``documents``, each a sequence of tokens, to shards of about ``shard_tokens`` in ``folder``; empty ones are
    left out. The index comes last: a folder without one is not complete.

    Raises:
        ConfigError: the folder holds something already, a token does not fit ``dtype``, or there is no document.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: not empty", fix="name a new folder, so that shards of two runs do not mix")
    fsio.make_folder(folder)
    shards: list[Shard] = []
    largest, most = -1, 2 ** (8 * BYTES[dtype]) - 1
    for part in _parts(documents, shard_tokens):
        for number, tokens in part:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > most:
                raise ConfigError(
                    f"document {number} has the token {low if low < 0 else high}, and {dtype} holds 0 to {most}",
                    fix="choose a wider --dtype" if low >= 0 else "tokens are whole numbers from 0 on",
                )
            largest = max(largest, high)
        shards.append(_write_shard(folder, len(shards), [tokens.astype(dtype) for _, tokens in part]))
    if not shards:
        raise ConfigError("no document with a token in it", fix="give other text, or another --documents")
    index = Index(shards=tuple(shards), dtype=dtype, largest=largest, tokenizer=tokenizer)
    fsio.write_bytes(folder / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
    return index


def _parts(documents: Iterable[Any], shard_tokens: int) -> Iterator[list[tuple[int, Array]]]:
    """What goes into each shard: (number of the document, its tokens)."""
    part: list[tuple[int, Array]] = []
    count = 0
    for number, document in enumerate(documents):
        tokens = np.asarray(document)
        if not tokens.size:
            continue
        part.append((number, tokens))
        count += tokens.size
        if count >= shard_tokens:
            yield part
            part, count = [], 0
    if part:
        yield part


def _write_shard(folder: Path, number: int, documents: Sequence[Array]) -> Shard:
    name = f"{number:05d}"
    ends = np.cumsum([len(d) for d in documents]).astype(np.int64)
    np.save(folder / f"{name}.ends.npy", ends, allow_pickle=False)
    with fsio.replacing(folder / f"{name}.bin") as out:
        for tokens in documents:
            out.write(tokens.tobytes())
    return Shard(file=f"{name}.bin", tokens=int(ends[-1]), ends=f"{name}.ends.npy")


def texts(path: Path, pattern: str, documents: DocumentsAre, key: str) -> Iterator[bytes]:
    """The documents of a file or folder of text: its files, their lines, or the strings under ``key`` of JSON lines.

    Raises:
        ConfigError: there is no such path, nothing fits ``pattern``, or a line is not such JSON.
    """
    for file in files(DataSpec(path=str(path), pattern=pattern)):
        if documents == "files":
            yield file.read_bytes()
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield line.rstrip(b"\r\n") if documents == "lines" else _of_json(file, number, line, key)


def _of_json(file: Path, number: int, line: bytes, key: str) -> bytes:
    try:
        found = json.loads(line)[key]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{file}, line {number}: no JSON object with {key!r}: {e}", fix="name the key: --key") from e
    if not isinstance(found, str):
        raise ConfigError(
            f"{file}, line {number}: {key!r} is {type(found).__name__}, not text", fix="name the key: --key"
        )
    return found.encode()


def of_bytes(text: bytes) -> Array:
    return np.frombuffer(text, dtype=np.uint8)


def of_function(function: Callable[[str], Sequence[int]]) -> Callable[[bytes], Sequence[int]]:
    """``function`` takes text; what is not UTF-8 becomes U+FFFD."""
    return lambda text: function(text.decode(errors="replace"))


def ended(documents: Iterable[Sequence[int] | Array], end: int | None) -> Iterator[Array]:
    """Each document with the token ``end`` behind it; None: as it is."""
    for document in documents:
        tokens = np.asarray(document, dtype=np.int64) if len(document) else np.zeros(0, np.int64)
        yield np.append(tokens, end) if end is not None and len(tokens) else tokens

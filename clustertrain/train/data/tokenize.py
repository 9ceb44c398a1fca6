"""Writes token shards. Nothing here imports torch: a login node may lack it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from clustertrain import fsio, reading
from clustertrain.config.data import DataSpec
from clustertrain.config.token_shards import BYTES, INDEX, Index, Shard, Width
from clustertrain.errors import ConfigError
from clustertrain.train.data.text_files import files

_OF_SHARD = re.compile(r"\d{5}\.(bin|ends\.npy)")
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
    left out. The index comes last: a folder without one is not complete. What fails leaves nothing.

    Raises:
        ConfigError: the folder cannot be made or holds something already, a token does not fit ``dtype``, or there is
            no document.
    """
    _refuse_full(folder)
    with _whole_or_gone(folder):
        return _write(folder, documents, dtype, shard_tokens, tokenizer)


def _refuse_full(folder: Path) -> None:
    found = [p.name for p in folder.iterdir()] if folder.exists() else []
    visible = [name for name in found if not name.startswith(".")]
    if visible and all(_OF_SHARD.fullmatch(name) for name in visible):
        raise ConfigError(
            f"{folder}: shards without an index, of a call that was killed or is still at it",
            fix="remove the folder, or name a new one",
        )
    if found:
        raise ConfigError(f"{folder}: not empty", fix="name a new folder, so that shards of two runs do not mix")


@contextlib.contextmanager
def _whole_or_gone(folder: Path) -> Iterator[None]:
    """The empty ``folder``, made where it is missing; emptied, and away if it was, when the block fails."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        fsio.make_folder(folder)
    except OSError as e:
        raise ConfigError(f"{folder}: {e.strerror}", fix="name a folder that you may write to") from e
    try:
        yield
    except BaseException as e:
        with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
            for path in folder.iterdir():
                path.unlink()
            for path in missing:
                path.rmdir()
        if isinstance(e, OSError) and e.filename is None:  # no space left, says a write
            e.filename = str(folder)
        raise


def _write(
    folder: Path, documents: Iterable[Sequence[int] | Array], dtype: Width, shard_tokens: int, tokenizer: str
) -> Index:
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
        found = reading.parse(line)[key]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{file}, line {number}: no JSON object with {key!r}: {e}", fix="name the key: --key") from e
    if not isinstance(found, str):
        raise ConfigError(
            f"{file}, line {number}: {key!r} is {type(found).__name__}, not text", fix="name the key: --key"
        )
    return found.encode()


def of_bytes(text: bytes) -> Array:
    return np.frombuffer(text, dtype=np.uint8)


def of_function(function: Callable[[str], Sequence[int]]) -> Callable[[bytes], Array]:
    """``function`` takes text; what is not UTF-8 becomes U+FFFD.

    Raises:
        ConfigError: when it gives something else than whole numbers.
    """

    def tokens(text: bytes) -> Array:
        found = function(text.decode(errors="replace"))
        ids = np.asarray(found)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ConfigError(
                f"the tokenizer gave {type(found).__name__} {found!r:.60} for a document, and not token ids",
                fix="let it return whole numbers, as tokenizer.encode(text).ids",
            )
        return ids

    return tokens


def ended(documents: Iterable[Sequence[int] | Array], end: int | None) -> Iterator[Array]:
    """Each document with the token ``end`` behind it; None: as it is."""
    for document in documents:
        tokens = np.asarray(document, dtype=np.int64) if len(document) else np.zeros(0, np.int64)
        yield np.append(tokens, end) if end is not None and len(tokens) else tokens

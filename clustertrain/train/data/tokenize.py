"""Writing of token shards. Does not import torch, which login nodes may lack."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from clustertrain import fsio, reading
from clustertrain.config.chat.encode import ChatEncoder, EncodedConversation
from clustertrain.config.chat.rows import list_chat_files, read_conversations
from clustertrain.config.chat.tokenizer import TokenizerFiles, build_tokenizer, encode_batch
from clustertrain.config.data import DataSpec
from clustertrain.config.parsing import saved_datasets
from clustertrain.config.parsing.token_shards import DTYPE_BYTES, INDEX_FILE, ShardIndex, TokenDtype, TokenShard
from clustertrain.errors import ConfigError
from clustertrain.train.data.text_files import list_files

_SHARD_FILE = re.compile(r"\d{5}\.(bin|(ends|answers)\.npy)")
SHARD_TOKENS = 32 * 1024 * 1024  # per shard, which is held in memory while it is written
BATCH_DOCUMENTS = 256  # tokenized by one call of the tokenizers library, with all cores
DocumentUnit = Literal["files", "lines", "jsonl", "rows"]

Array = np.ndarray[Any, np.dtype[Any]]
Document = Sequence[int] | Array | EncodedConversation


def write(
    folder: Path,
    documents: Iterable[Document],
    *,
    dtype: TokenDtype = "uint32",
    shard_tokens: int = SHARD_TOKENS,
    tokenizer: str = "",
) -> ShardIndex:
    """Write ``documents`` to shards of about ``shard_tokens`` tokens in ``folder``.

    A document is a sequence of tokens, or a conversation, whose answers are then marked; all are of one sort. Empty
    documents are skipped. The index is written last, so a folder without one is incomplete. A failed call removes
    everything that it wrote.

    Raises:
        ConfigError: the folder cannot be created or is not empty, a token does not fit ``dtype``, or no document has
            tokens.
    """
    _check_empty(folder)
    with _all_or_nothing(folder):
        return _write_shards(folder, documents, dtype, shard_tokens, tokenizer)


def _check_empty(folder: Path) -> None:
    entries = [p.name for p in folder.iterdir()] if folder.exists() else []
    visible = [name for name in entries if not name.startswith(".")]
    if visible and all(_SHARD_FILE.fullmatch(name) for name in visible):
        raise ConfigError(
            f"{folder}: shards without an index, left by a call that was killed or is still running",
            fix="remove the folder, or choose a new one",
        )
    if entries:
        raise ConfigError(f"{folder}: not empty", fix="choose a new folder, so that shards of two calls do not mix")


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Iterator[None]:
    """Create ``folder`` if it is missing; when the block fails, empty it and remove what was created."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        fsio.make_folder(folder)
    except OSError as e:
        raise ConfigError(f"{folder}: {e.strerror}", fix="choose a writable folder") from e
    try:
        yield
    except BaseException as e:
        with contextlib.suppress(OSError):  # another process may have added files
            for path in folder.iterdir():
                path.unlink()
            for path in missing:
                path.rmdir()
        if isinstance(e, OSError) and e.filename is None:  # write() on a full disk reports no file
            e.filename = str(folder)
        raise


def _write_shards(
    folder: Path, documents: Iterable[Document], dtype: TokenDtype, shard_tokens: int, tokenizer: str
) -> ShardIndex:
    shards: list[TokenShard] = []
    largest, max_token = -1, 2 ** (8 * DTYPE_BYTES[dtype]) - 1
    for group in _group_by_shard(documents, shard_tokens):
        for number, tokens, _ in group:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > max_token:
                raise ConfigError(
                    f"document {number} has the token {low if low < 0 else high}: {dtype} holds 0 to {max_token}",
                    fix="choose a wider --dtype" if low >= 0 else "use token ids >= 0",
                )
            largest = max(largest, high)
        answers = [marks for _, _, marks in group if marks is not None]
        shards.append(_write_shard(folder, len(shards), [tokens.astype(dtype) for _, tokens, _ in group], answers))
    if not shards:
        raise ConfigError("no document has tokens", fix="check the input text and --documents")
    index = ShardIndex(shards=tuple(shards), dtype=dtype, max_token_id=largest, tokenizer=tokenizer)
    fsio.write_bytes(folder / INDEX_FILE, msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
    return index


def _group_by_shard(
    documents: Iterable[Document], shard_tokens: int
) -> Iterator[list[tuple[int, Array, Array | None]]]:
    """Yield (document number, tokens, whether each is an answer) of the documents of each shard."""
    group: list[tuple[int, Array, Array | None]] = []
    count = 0
    for number, document in enumerate(documents):
        tokens, answers = (
            (document.ids, document.answers)
            if isinstance(document, EncodedConversation)
            else (np.asarray(document), None)
        )
        if not tokens.size:
            continue
        group.append((number, tokens, answers))
        count += tokens.size
        if count >= shard_tokens:
            yield group
            group, count = [], 0
    if group:
        yield group


def _write_shard(folder: Path, number: int, documents: Sequence[Array], answers: Sequence[Array]) -> TokenShard:
    name = f"{number:05d}"
    if answers:
        np.save(folder / f"{name}.answers.npy", np.concatenate(answers), allow_pickle=False)
    ends = np.cumsum([len(d) for d in documents]).astype(np.int64)
    np.save(folder / f"{name}.ends.npy", ends, allow_pickle=False)
    with fsio.atomic_write(folder / f"{name}.bin") as out:
        for tokens in documents:
            out.write(tokens.tobytes())
    return TokenShard(
        file=f"{name}.bin",
        tokens=int(ends[-1]),
        document_ends=f"{name}.ends.npy",
        answers=f"{name}.answers.npy" if answers else "",
    )


def read_documents(path: Path, pattern: str, unit: DocumentUnit, key: str) -> Iterator[bytes]:
    """Yield the documents of a text file or folder: whole files, their lines, or the strings under ``key`` of JSON
    lines or of the rows of a saved data set.

    Raises:
        ConfigError: the path is missing, no file matches ``pattern``, or a line or row has no such string.
        UnsuitableEnvironment: a saved data set needs pyarrow, which is not installed.
    """
    if unit == "rows":
        yield from saved_datasets.read_texts(path, key, "PATH")
        return
    for file in list_files(DataSpec(path=str(path), pattern=pattern)):
        if unit == "files":
            yield file.read_bytes()
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield line.rstrip(b"\r\n") if unit == "lines" else _text_from_json(file, number, line, key)


def _text_from_json(file: Path, number: int, line: bytes, key: str) -> bytes:
    try:
        text = reading.parse_json(line)[key]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"{file}, line {number}: not a JSON object with {key!r}: {e}", fix="set --key to the text's key"
        ) from e
    if not isinstance(text, str):
        raise ConfigError(
            f"{file}, line {number}: {key!r} is {type(text).__name__}, not text", fix="set --key to the text's key"
        )
    return text.encode()


def tokenize_bytes(text: bytes) -> Array:
    """Return the bytes of ``text`` as tokens."""
    return np.frombuffer(text, dtype=np.uint8)


def tokenizer_from_function(function: Callable[[str], Sequence[int]]) -> Callable[[bytes], Array]:
    """Wrap ``function``, which takes text, to take bytes; invalid UTF-8 becomes U+FFFD.

    Raises:
        ConfigError: the function returned something other than a sequence of integers.
    """

    def tokenize(text: bytes) -> Array:
        output = function(text.decode(errors="replace"))
        ids = np.asarray(output)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ConfigError(
                f"the tokenizer returned {type(output).__name__} {output!r:.60} for a document, not token ids",
                fix="return integers, such as tokenizer.encode(text).ids",
            )
        return ids

    return tokenize


def encode_documents(files: TokenizerFiles, documents: Iterable[bytes]) -> Iterator[Array]:
    """Yield the tokens of each document, without those that a tokenizer adds by itself; invalid UTF-8 becomes U+FFFD.

    Raises:
        ConfigError: the tokenizers library cannot read the tokenizer.
        UnsuitableEnvironment: the library is not installed.
    """
    tokenizer = build_tokenizer(files, "--tokenizer")
    texts = ((f"document {i}", document.decode(errors="replace")) for i, document in enumerate(documents))
    while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
        names, contents = zip(*batch, strict=True)
        for encoding in encode_batch(tokenizer, contents, names):
            yield np.array(encoding.ids, dtype=np.int64)


def encode_chats(tokenizer: Path, template: Path | None, path: Path) -> Iterator[EncodedConversation]:
    """Yield the conversations of a chat file, or of the chat files of a folder, as tokens.

    Raises:
        ConfigError: the tokenizer, the template or a row is not usable.
        UnsuitableEnvironment: a package is not installed.
    """
    encoder = ChatEncoder(tokenizer, template)
    for file in list_chat_files(path, "PATH"):
        yield from encoder.encode(read_conversations(file))


def append_end_token(documents: Iterable[Sequence[int] | Array], end_token: int | None) -> Iterator[Array]:
    """Yield each nonempty document with ``end_token`` appended; unchanged if ``end_token`` is None."""
    for document in documents:
        tokens = np.asarray(document, dtype=np.int64) if len(document) else np.zeros(0, np.int64)
        yield np.append(tokens, end_token) if end_token is not None and len(tokens) else tokens

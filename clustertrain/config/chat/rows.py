"""Rows of chat files: conversations with roles, from JSON lines, Parquet and saved data sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertrain import extras, reading
from clustertrain.config.parsing import saved_datasets
from clustertrain.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWER_ROLE = "assistant"
MAX_ROW_BYTES = 64 * reading.MIB
_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
_SUFFIXES = (".jsonl", ".parquet")
_SHAPE_FIX = (
    'write {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, or '
    '{"prompt": "…", "completion": "…"}'
)


@dataclass(frozen=True)
class Conversation:
    """A row of a chat file."""

    where: str
    """File and number of the row, for messages."""
    messages: list[dict[str, Any]]
    """The messages, as the template receives them."""
    trained: tuple[int, ...]
    """Indices of the assistant's messages that are trained on; never empty."""
    tools: list[Any] | None = None
    """Descriptions of functions, which the template may show to the model."""


_PAIR_FIX = (
    'write {"prompt": "…", "chosen": "…", "rejected": "…"}, or "chosen" and "rejected" as two lists of messages that '
    "share their beginning"
)


@dataclass(frozen=True)
class PreferencePair:
    """A row with two continuations of one conversation."""

    chosen: Conversation
    rejected: Conversation


def list_chat_files(path: Path, key: str = "data.path") -> list[Path]:
    """Return ``path`` itself if it is a file or a saved data set, otherwise its .jsonl and .parquet files, sorted.

    Raises:
        ConfigError: there is no such path, or no such file in it.
    """
    if not path.is_dir():
        if not path.exists():
            raise ConfigError(
                f"{key} = {str(path)!r}: no such file or folder", fix="use a path that every node can read"
            )
        return [path]
    if saved_datasets.is_saved_dataset(path):
        return [path]
    files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file() and not p.name.startswith("."))
    if not files:
        raise ConfigError(
            f"{key} = {str(path)!r}: no {' or '.join(_SUFFIXES)} files",
            fix="name a folder of chat files, one file, or a data set saved with save_to_disk",
        )
    return files


def read_conversations(path: Path, max_bytes: int | None = None) -> Iterator[Conversation]:
    """Yield the rows of a saved data set or of one file: Parquet by its suffix, otherwise JSON lines.

    Blank lines are skipped.

    Args:
        max_bytes: stop after about this many bytes, or after the first row group of Parquet; None: read all.

    Raises:
        ConfigError: the file cannot be read, or a row is not a conversation; the message names the row.
        UnsuitableEnvironment: Parquet needs pyarrow, which is not installed.
    """
    for where, row in _read_rows(path, max_bytes):
        yield parse_row(row, where)


def read_preferences(path: Path, max_bytes: int | None = None) -> Iterator[PreferencePair]:
    """Yield the rows of a file or saved data set of preferences; arguments and errors as :func:`read_conversations`."""
    for where, row in _read_rows(path, max_bytes):
        yield parse_preference(row, where)


def read_answers(path: Path) -> Iterator[Conversation]:
    """Yield the chosen and the rejected conversation of each pair in turn."""
    for pair in read_preferences(path):
        yield pair.chosen
        yield pair.rejected


def _read_rows(path: Path, max_bytes: int | None) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        return _read_saved_dataset(path, max_bytes)
    return _read_parquet(path, max_bytes) if path.suffix == ".parquet" else _read_json_lines(path, max_bytes)


def _read_saved_dataset(path: Path, max_bytes: int | None) -> Iterator[tuple[str, Any]]:
    number, read_bytes = 0, 0
    for batch in saved_datasets.iter_batches(path, _COLUMNS):
        if max_bytes is not None and read_bytes >= max_bytes:
            return
        read_bytes += batch.nbytes
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _read_json_lines(path: Path, max_bytes: int | None) -> Iterator[tuple[str, Any]]:
    read_bytes, number = 0, 0
    try:
        with reading.open_regular(path) as file:
            while (max_bytes is None or read_bytes < max_bytes) and (line := file.readline(MAX_ROW_BYTES + 1)):
                read_bytes, number = read_bytes + len(line), number + 1
                if len(line) > MAX_ROW_BYTES:
                    raise ConfigError(
                        f"{path}, line {number}: longer than {MAX_ROW_BYTES // reading.MIB} MiB",
                        fix="write one JSON object per line",
                    )
                if line.strip():
                    yield f"{path}, line {number}", _parse_line(line, f"{path}, line {number}")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}", fix="use JSON lines or Parquet that every node can read") from e


def _parse_line(line: bytes, where: str) -> Any:
    try:
        return reading.parse_json(line)
    except ValueError as e:
        raise ConfigError(f"{where}: not JSON: {e}", fix="write one JSON object per line, and correct this one") from e


def _read_parquet(path: Path, max_bytes: int | None) -> Iterator[tuple[str, Any]]:
    extras.require("pyarrow.parquet", f"{path}", alternative="convert the data to JSON lines")
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
            if not columns:
                names = ", ".join(file.schema_arrow.names[:8])
                raise ConfigError(f"{path}: neither messages nor prompt and completion among its columns: {names}")
            row_groups = None if max_bytes is None else range(min(1, file.num_row_groups))
            for batch in file.iter_batches(batch_size=1024, columns=columns, row_groups=row_groups):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (OSError, pyarrow.ArrowException) as e:
        raise ConfigError(f"{path}: not a readable Parquet file: {e}", fix="write it again") from e


def parse_row(row: Any, where: str) -> Conversation:
    """Return the conversation of ``row``.

    ``messages`` is a conversation. ``prompt`` and ``completion`` are the user's and the assistant's text, or two lists
    of messages, of which only the assistant's in the completion are trained on.

    Raises:
        ConfigError: ``row`` has another shape, an unknown role, or no answer; the message starts with ``where``.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {_describe(row)} instead of an object", fix=_SHAPE_FIX)
    # Parquet has every column in every row.
    present = {key: value for key, value in row.items() if value is not None}
    if "messages" in present:
        messages, first_trained = _parse_messages(present["messages"], f"{where}: messages"), 0
    elif "prompt" in present and "completion" in present:
        prompt = _as_messages(present["prompt"], "user", f"{where}: prompt")
        messages = prompt + _as_messages(present["completion"], ANSWER_ROLE, f"{where}: completion")
        first_trained = len(prompt)
    else:
        raise _unknown_shape(present, where)
    return Conversation(where, messages, _find_trained(messages, first_trained, where), _parse_tools(present, where))


def parse_preference(row: Any, where: str) -> PreferencePair:
    """Return the two conversations of ``row``.

    ``chosen`` and ``rejected`` are texts or lists of messages that follow ``prompt``. Without it both are whole
    conversations, and their common beginning is the prompt. Only the assistant's messages after the prompt are trained
    on.

    Raises:
        ConfigError: ``row`` has another shape, or the answers are equal or empty; the message starts with ``where``.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {_describe(row)} instead of an object", fix=_PAIR_FIX)
    present = {key: value for key, value in row.items() if value is not None}
    if not {"chosen", "rejected"} <= present.keys():
        listed = ", ".join(f"{key!r:.60}" for key in list(present)[:8]) or "none"
        raise ConfigError(f"{where}: no pair of chosen and rejected; its keys: {listed}", fix=_PAIR_FIX)
    if "prompt" in present:
        prompt = _as_messages(present["prompt"], "user", f"{where}: prompt")
        chosen, rejected = (
            prompt + _as_messages(present[key], ANSWER_ROLE, f"{where}: {key}") for key in ("chosen", "rejected")
        )
        first = len(prompt)
    else:
        chosen, rejected = (_parse_messages(present[key], f"{where}: {key}") for key in ("chosen", "rejected"))
        shorter = min(len(chosen), len(rejected))
        first = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if chosen == rejected:
        raise ConfigError(f"{where}: chosen and rejected are the same", fix="remove the row: it prefers neither")
    if not first:
        raise ConfigError(f"{where}: chosen and rejected share no prompt", fix=_PAIR_FIX)
    tools = _parse_tools(present, where)
    return PreferencePair(
        *(
            Conversation(f"{where}: {name}", messages, _find_trained(messages, first, f"{where}: {name}"), tools)
            for name, messages in (("chosen", chosen), ("rejected", rejected))
        )
    )


def _find_trained(messages: list[dict[str, Any]], first: int, where: str) -> tuple[int, ...]:
    """Return the indices of the answers from message ``first`` on; raise ConfigError if there is none, or one is
    empty."""
    trained = tuple(i for i in range(first, len(messages)) if _is_trained(messages[i]))
    if not trained:
        raise ConfigError(
            f"{where}: no answer: no {ANSWER_ROLE} message" + (" after the prompt" if first else ""),
            fix="add the answer, or remove the row: there is nothing in it to learn",
        )
    for i in trained:
        if not (messages[i].get("content") or messages[i].get("tool_calls")):
            raise ConfigError(f"{where}: message {i + 1} is an empty answer", fix="add its text, or remove the row")
    return trained


def _parse_tools(row: dict[str, Any], where: str) -> list[Any] | None:
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"{where}: tools is {_describe(tools)}, not a list", fix="list the functions, or remove it")
    return tools or None


def _as_messages(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _parse_messages(value, where)


def _parse_messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {_describe(value)} instead of a list of messages", fix=_SHAPE_FIX)
    return [_parse_message(message, f"{where}, message {i}") for i, message in enumerate(value, 1)]


def _parse_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        fix = _SHAPE_FIX
        if isinstance(message, dict) and "from" in message:
            fix = 'rename "from" to "role" and "value" to "content", with the roles ' + ", ".join(ROLES)
        raise ConfigError(f"{where}: no role", fix=fix)
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise ConfigError(f"{where}: unknown role {role!r:.60}", fix=f"use {', '.join(ROLES)}")
    has_calls = bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and has_calls):
        raise ConfigError(
            f"{where} ({role}): content is {_describe(content)}, not text",
            fix="write the text as one string; images and lists of parts are not supported",
        )
    # Templates ask `is defined`, and columns of Parquet exist in every message. transformers drops these too.
    return {key: value for key, value in message.items() if value is not None}


def _is_trained(message: dict[str, Any]) -> bool:
    return message["role"] == ANSWER_ROLE and message.get("weight") != 0


def _unknown_shape(row: Iterable[str], where: str) -> ConfigError:
    keys = list(row)
    if {"chosen", "rejected"} <= set(keys):
        return ConfigError(
            f"{where}: a pair of a chosen and a rejected answer",
            fix='set objective.kind = "dpo", or train on the chosen answers, as messages or completion',
        )
    listed = ", ".join(f"{key!r:.60}" for key in keys[:8]) or "none"
    return ConfigError(f"{where}: neither messages nor prompt and completion; its keys: {listed}", fix=_SHAPE_FIX)


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    names = {str: "text", list: "a list", dict: "an object", bool: "a truth value", int: "a number", float: "a number"}
    return "an empty list" if value == [] else names.get(type(value), type(value).__name__)

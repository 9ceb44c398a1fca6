"""Tokenizers from the files of the `tokenizers` library, and what other files say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from clustertrain import extras, reading
from clustertrain.errors import ConfigError

TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
MAX_TOKENIZER_BYTES = 256 * reading.MIB  # those of 256,000 tokens have about 35
_SAVE_FIX = "save it with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(folder)"


@dataclass(frozen=True)
class TokenizerFiles:
    """A ``tokenizer.json``, and the special tokens and the chat template of the files beside it."""

    path: Path
    """The ``tokenizer.json``."""
    text: str
    """Its content."""
    largest_id: int
    special_tokens: Mapping[str, str]
    """For example ``{"bos_token": "<s>"}``; empty if only the file is known."""
    template: str | None
    """The chat template, None if there is none."""
    template_name: str
    """Where the template is from, for messages."""
    has_config: bool
    """Whether there is a ``tokenizer_config.json``, which names the special tokens."""

    @property
    def version(self) -> str:
        """A checksum of the tokenizer's file."""
        return f"{TOKENIZER_FILE} xxh3:{xxhash.xxh3_64_hexdigest(self.text.encode())}"


def load_tokenizer_files(path: Path, key: str = "data.tokenizer") -> TokenizerFiles:
    """Read the tokenizer at ``path``, a ``tokenizer.json`` or a folder with it, without the library.

    The special tokens and the template are read only from a folder.

    Raises:
        ConfigError: a file is missing or not what it should be; the message starts with ``key``.
    """
    label = f"{key} = {str(path)!r}"
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.exists():
        problem = f"no {TOKENIZER_FILE} in it" if path.is_dir() else "no such file or folder"
        raise ConfigError(f"{label}: {problem}", fix=_SAVE_FIX if path.is_dir() else "check the path")
    text = _read_text(file, label, MAX_TOKENIZER_BYTES)
    document = _parse(text, file, label)
    largest_id = _find_largest_id(document, file, label)
    config_path = path / CONFIG_FILE if path.is_dir() else None
    config = _read_config(config_path, label) if config_path is not None and config_path.exists() else None
    if config is not None:
        _check_added_tokens(config.get("added_tokens_decoder"), document, label)
    template, template_name = _find_template(path, config or {}, label)
    return TokenizerFiles(
        file, text, largest_id, _find_special_tokens(config or {}), template, template_name, config is not None
    )


def _read_text(path: Path, label: str, limit: int = reading.MAX_DOCUMENT_BYTES) -> str:
    try:
        return reading.read_text(path, limit)
    except reading.UnusableFile as e:
        raise ConfigError(f"{label}: {e.message}", fix=_SAVE_FIX) from e
    except OSError as e:
        raise ConfigError(f"{label}: {path}: {e.strerror}", fix="use a path that every node can read") from e


def _parse(text: str, path: Path, label: str) -> dict[str, Any]:
    try:
        document = reading.parse_json(text)
    except ValueError as e:
        raise ConfigError(f"{label}: {path} is not JSON: {e}", fix=_SAVE_FIX) from e
    if not isinstance(document, dict):
        raise ConfigError(f"{label}: {path} is not a JSON object", fix=_SAVE_FIX)
    return document


def _find_largest_id(document: Mapping[str, Any], path: Path, label: str) -> int:
    """Return the largest token id in a ``tokenizer.json``, among its vocabulary and its added tokens."""
    model, added = document.get("model"), document.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, (dict, list)) or not isinstance(added, list):
        raise ConfigError(f"{label}: {path} is not a file of the tokenizers library: no vocabulary", fix=_SAVE_FIX)
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    ids += [token.get("id") for token in added if isinstance(token, dict)]
    if not ids or not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"{label}: {path} has no token, or one without a number", fix=_SAVE_FIX)
    return max(ids)


def _check_added_tokens(listed: Any, document: Mapping[str, Any], label: str) -> None:
    """Raise ConfigError if the configuration lists a token that the tokenizer lacks: transformers would add it."""
    ids = _map_ids(document) if isinstance(listed, dict) else {}
    for number, token in listed.items() if isinstance(listed, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if isinstance(content, str) and str(ids.get(content)) != number:
            raise ConfigError(
                f"{label}: {CONFIG_FILE} lists the token {content!r:.60} as {number:.20}, and in {TOKENIZER_FILE} it "
                f"is {ids.get(content, 'missing')}",
                fix=_SAVE_FIX,
            )


def _map_ids(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the id of each token of a ``tokenizer.json``; the vocabulary of a Unigram model lists (token, score)."""
    vocabulary, added = document["model"]["vocab"], document.get("added_tokens") or []
    if isinstance(vocabulary, list):
        tokens = [entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary]
        vocabulary = {token: i for i, token in enumerate(tokens) if isinstance(token, str)}
    added = [token for token in added if isinstance(token, dict) and isinstance(token.get("content"), str)]
    return {**vocabulary, **{token["content"]: token.get("id") for token in added}}


def _read_config(path: Path, label: str) -> dict[str, Any]:
    return _parse(_read_text(path, label), path, label)


def _find_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by the names under which templates read them."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _find_template(path: Path, config: Mapping[str, Any], label: str) -> tuple[str | None, str]:
    """Return the chat template of the folder ``path``, or None, and its source."""
    file = path / TEMPLATE_FILE
    if path.is_dir() and file.exists():
        return _read_text(file, label), str(file)
    template, name = config.get("chat_template"), f"chat_template of {path / CONFIG_FILE}"
    if isinstance(template, list):  # several templates with names
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        if "default" not in by_name:
            raise ConfigError(
                f"{label}: {name} has no default among its templates: {', '.join(map(str, by_name))}",
                fix="write the one to use into a file, and set data.chat_template to it",
            )
        template = by_name["default"]
    return (template if isinstance(template, str) else None), name


def read_template_file(path: Path, key: str = "data.chat_template") -> str:
    """Return the content of a template file of the user's.

    Raises:
        ConfigError: it cannot be read.
    """
    label = f"{key} = {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{label}: {'it is a folder' if path.is_dir() else 'no such file'}", fix="check the path")
    return _read_text(path, label)


def check_vocabulary(files: TokenizerFiles, vocab_size: int, key: str = "data.tokenizer") -> None:
    """Raise ConfigError if the tokenizer has tokens for which the model has no embedding."""
    if files.largest_id >= vocab_size:
        raise ConfigError(
            f"{key} = {str(files.path)!r} has tokens up to {files.largest_id}, but model.vocab_size = {vocab_size} "
            f"allows tokens up to {vocab_size - 1}",
            fix=f"set model.vocab_size = {files.largest_id + 1} or more, or use the model's own tokenizer",
        )


def encode_batch(tokenizer: Any, texts: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Return the ``tokenizers.Encoding`` of each text, computed with all cores.

    Raises:
        ConfigError: the tokenizer cannot represent a text; the message has its name.
    """
    try:
        encodings: list[Any] = tokenizer.encode_batch(texts, add_special_tokens=False)
        return encodings
    except Exception as e:  # the library raises Exception itself
        if len(texts) > 1:
            return [encode_batch(tokenizer, [text], [name])[0] for text, name in zip(texts, names, strict=True)]
        raise ConfigError(
            f"{names[0]}: the tokenizer cannot represent its text: {e}",
            fix="use a tokenizer with a token for unknown text, or remove it",
        ) from e


def build_tokenizer(files: TokenizerFiles, needed_by: str) -> Any:
    """Return the ``tokenizers.Tokenizer`` of ``files``, which only splits text: it adds, cuts and pads nothing.

    Raises:
        ConfigError: the library cannot read the file.
        UnsuitableEnvironment: the library is not installed.
    """
    extras.require("tokenizers", needed_by)
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(files.text)
    except Exception as e:  # the library raises Exception itself
        raise ConfigError(
            f"{needed_by}: tokenizers {tokenizers.__version__} cannot read {files.path}: {e}",
            fix="install a newer version of tokenizers, or save the file again",
        ) from e
    # The template writes the special tokens, and a file may keep the truncation that it was saved with. The post-
    # processor of byte-level tokenizers also takes spaces out of the offsets, which the answers are found by.
    tokenizer.post_processor = tokenizers.processors.Sequence([])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

"""Conversations to tokens, with a mark on each token that is an answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clustertrain.config.chat.rows import Conversation
from clustertrain.config.chat.template import ChatTemplate, Span
from clustertrain.config.chat.tokenizer import (
    TokenizerFiles,
    build_tokenizer,
    encode_batch,
    load_tokenizer_files,
    read_template_file,
)
from clustertrain.errors import ConfigError

BATCH_ROWS = 256  # tokenized by one call, with all cores
_SPECIAL_SUFFIX = "_token"

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class EncodedConversation:
    """A conversation as tokens."""

    where: str
    """File and number of the row, for messages."""
    ids: IntArray
    answers: BoolArray
    """Whether each token covers a character of a trained answer, (tokens,)."""


def build_template(files: TokenizerFiles, template_path: Path | None) -> ChatTemplate:
    """Return the template of ``template_path``, or that of the tokenizer if it is None.

    Raises:
        ConfigError: there is none, it is empty or not Jinja, or it reads special tokens that are unknown.
    """
    if template_path is not None:
        source, name = read_template_file(template_path), str(template_path)
    elif files.template is not None:
        source, name = files.template, files.template_name
    else:
        raise ConfigError(
            f"data.tokenizer = {str(files.path)!r}: no chat template",
            fix="name the folder of a chat model's tokenizer, or set data.chat_template to a Jinja file",
        )
    template = ChatTemplate(source, files.special_tokens, name)
    unknown = sorted(v for v in template.variables if v.endswith(_SPECIAL_SUFFIX))
    if unknown and not files.has_config:
        raise ConfigError(
            f"{name} uses {' and '.join(unknown)}, and {files.path} does not say what that is",
            fix="set data.tokenizer to a folder that also has tokenizer_config.json, or write the token into the "
            "template",
        )
    return template


class ChatEncoder:
    """A tokenizer and a chat template."""

    def __init__(self, tokenizer_path: Path, template_path: Path | None = None) -> None:
        """Load both.

        Raises:
            ConfigError: a file is missing or unusable, or there is no template.
            UnsuitableEnvironment: the tokenizers library is not installed.
        """
        self.files = load_tokenizer_files(tokenizer_path)
        self.template = build_template(self.files, template_path)
        self._tokenizer = build_tokenizer(self.files, "data.tokenizer")

    def encode(self, conversations: Iterable[Conversation]) -> Iterator[EncodedConversation]:
        """Yield ``conversations`` as tokens.

        Raises:
            ConfigError: the template does not determine where a row's answers are, or no token covers them.
        """
        rows = iter(conversations)
        while batch := list(itertools.islice(rows, BATCH_ROWS)):
            rendered = [self.template.find_answers(conversation) for conversation in batch]
            texts, names = [text for text, _ in rendered], [conversation.where for conversation in batch]
            encodings = encode_batch(self._tokenizer, texts, names)
            for conversation, (_, spans), encoding in zip(batch, rendered, encodings, strict=True):
                answers = mark_tokens(encoding.offsets, spans)
                if not answers[1:].any():  # nothing predicts the first token
                    raise ConfigError(
                        f"{conversation.where}: no token of {self.files.path} covers the answer",
                        fix="check the tokenizer's normalizer, or remove the row",
                    )
                yield EncodedConversation(conversation.where, np.array(encoding.ids, dtype=np.int64), answers)

    @property
    def added_ids(self) -> frozenset[int]:
        """Tokens outside the learned vocabulary, such as the end of a turn."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def mark_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> BoolArray:
    """Return whether each token covers a character in ``spans``.

    A token without characters, such as the mark of a word's start, counts where it lies in a span.

    Args:
        offsets: first character and end of each token.
        spans: first character and end of each answer.
    """
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    last = np.maximum(ends, starts + 1)
    marked = np.zeros(len(starts), dtype=bool)
    for first, end in spans:
        marked |= (starts < end) & (last > first)
    return marked

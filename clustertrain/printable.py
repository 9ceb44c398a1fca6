"""Escaping of text from other users before it is printed to a terminal.

With raw control characters, a run's name, event or log could write to the clipboard (OSC 52), overwrite earlier output,
or, by reversing the direction of text, look like another text.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, TextIO, cast

# C0 except \t and \n, DEL, C1, characters that change the text direction, and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_ASCII = re.compile("[^\x00-\x7f]")


def printable(text: str, *, keep: str = "") -> str:
    """Return ``text`` with control characters escaped, for example as ``\\x1b``, except those in ``keep``."""
    return _UNSAFE.sub(lambda m: m[0] if m[0] in keep else _escape(m[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable_json(document: str, encoding: str | None = None) -> str:
    """Return the JSON ``document`` with JSON's escapes for control characters.

    Characters that ``encoding`` lacks cause all non-ASCII characters to be escaped.
    """
    document = _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", document)
    if _escape_unencodable(document, encoding) == document:
        return document
    return _NOT_ASCII.sub(lambda m: json.dumps(m[0])[1:-1], document)


def _escape_unencodable(text: str, encoding: str | None) -> str:
    """Return ``text`` with escapes for characters that ``encoding`` lacks, on which a text stream would raise."""
    if encoding is None or text.isascii():
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


class PrintableStream:
    """A text stream that escapes what is written to it, as :func:`printable` does.

    :func:`unwrap_stream` returns the underlying stream.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        return self.raw.write(_escape_unencodable(printable(text), self.raw.encoding))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would use it to bypass this stream if the encoding is ASCII
            raise AttributeError(name)
        return getattr(self.raw, name)


def unwrap_stream(stream: IO[str]) -> TextIO:
    """Return the stream that a :class:`PrintableStream` wraps, for callers that send control sequences themselves."""
    return stream.raw if isinstance(stream, PrintableStream) else cast(TextIO, stream)


@contextlib.contextmanager
def sanitized_output() -> Iterator[None]:
    """Within the block, escape everything that this process prints, including click's messages."""
    original = sys.stdout, sys.stderr
    # A closed stream (`>&-`) is None.
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) if stream else stream for stream in original)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original

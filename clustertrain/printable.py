"""The door for text that somebody else wrote, on its way to a terminal: what a terminal acts on is shown escaped.

With raw control characters a run's name, event or log could write the clipboard (OSC 52), change what was printed
before it, or make a text look like another one (the characters that turn its direction).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, TextIO, cast

# C0 but \t and \n, DEL, C1, what turns the direction of text, and halves of surrogate pairs, which no encoding takes.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_ASCII = re.compile("[^\x00-\x7f]")


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with ``\\x1b`` and the like in the place of control characters; those of ``keep`` stay."""
    return _UNSAFE.sub(lambda m: m[0] if m[0] in keep else _escape(m[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable_json(document: str, encoding: str | None = None) -> str:
    """JSON with escapes of JSON's own for what JSON allows to stand as it is and a terminal would act on, and for what
    ``encoding`` lacks."""
    document = _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", document)
    if _escape_unencodable(document, encoding) == document:
        return document
    return _NOT_ASCII.sub(lambda m: json.dumps(m[0])[1:-1], document)


def _escape_unencodable(text: str, encoding: str | None) -> str:
    """``text`` with escapes for what ``encoding`` lacks: a stream of Python's raises there."""
    if encoding is None or text.isascii():
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


class PrintableStream:
    """A text stream that shows what is written to it as :func:`printable` does; ``unwrap_stream`` is the stream
    itself."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        return self.raw.write(_escape_unencodable(printable(text), self.raw.encoding))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click writes past this stream where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self.raw, name)


def unwrap_stream(stream: IO[str]) -> TextIO:
    """The stream behind a :class:`PrintableStream`, for who sends the terminal commands and escapes text itself."""
    return stream.raw if isinstance(stream, PrintableStream) else cast(TextIO, stream)


@contextlib.contextmanager
def sanitized_output() -> Iterator[None]:
    """Whatever this process prints in the block goes through :func:`printable`, click's messages as well."""
    original = sys.stdout, sys.stderr
    # Python has None in the place of one that was closed, `>&-`.
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) if stream else stream for stream in original)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original

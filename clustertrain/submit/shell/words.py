"""Words and operators of a POSIX shell or bash, with their places in the text.

The grammar is that part which decides where words and commands end: quotes, escapes, expansions, comments, operators,
redirections and here-documents. Nothing is expanded or executed.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

from clustertrain.errors import UsageError

_OPERATORS = (
    "&>>", "<<<", "<<-", ";;&", "&&", "||", ";;", ";&", "|&", "&>", "<<", ">>", ">|", "<>", ">&", "<&", "&", "|", ";",
    "<", ">", "(", ")",
)  # fmt: skip
REDIRECTIONS = frozenset({"&>>", "<<<", "<<-", "&>", "<<", ">>", ">|", "<>", ">&", "<&", "<", ">"})
_META = frozenset(" \t\n;&|<>()")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"`$]+")
_NAME = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}


@dataclass(frozen=True)
class Piece:
    """A part of a word: literal text, or an expansion as it stands in the source."""

    text: str
    is_quoted: bool
    is_expansion: bool = False


@dataclass
class Token:
    """A word, or an operator (``pieces`` is None)."""

    text: str
    """As in the source."""
    start: int
    end: int
    pieces: list[Piece] | None = None
    heredoc: str = ""
    """Body of the here-document whose delimiter this word is."""
    heredoc_end: int = 0
    """Offset after the line that ends it; 0: none."""

    @property
    def is_word(self) -> bool:
        return self.pieces is not None

    @property
    def keyword(self) -> str:
        """The text of a word without quotes and expansions, which alone can be a reserved word; otherwise empty."""
        pieces = self.pieces or []
        return pieces[0].text if len(pieces) == 1 and not (pieces[0].is_quoted or pieces[0].is_expansion) else ""


@dataclass
class Source:
    """A text with the numbers of its lines."""

    text: str
    name: str
    """Of the script, in messages."""
    first_line: int = 1
    _starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._starts = [match.end() for match in re.finditer("\n", self.text)]

    def line_at(self, offset: int) -> int:
        return self.first_line + bisect.bisect_right(self._starts, offset)

    def error(self, offset: int, problem: str, fix: str) -> UsageError:
        return UsageError(f"{self.name}, line {self.line_at(offset)}: {problem}", fix=fix)


def split_tokens(source: Source) -> list[Token]:
    """Return the words and operators of ``source``; a line break is the operator ``\\n``.

    Raises:
        UsageError: a quote, an expansion or a here-document does not end.
    """
    return _Lexer(source).run()


class _Lexer:
    def __init__(self, source: Source) -> None:
        self._source, self._text = source, source.text
        self._at = 0
        self._tokens: list[Token] = []
        # Words that are delimiters of here-documents of this line, and whether tabs are stripped.
        self._heredocs: list[tuple[Token, bool]] = []

    def run(self) -> list[Token]:
        text = self._text
        while self._at < len(text):
            character = text[self._at]
            if character == "\n":
                self._operator("\n")
                self._read_heredocs()
            elif character.isspace():
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._at += 2
            elif character == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif operator := self._find_operator():
                self._operator(operator)
            else:
                self._word()
        return self._tokens

    def _find_operator(self) -> str:
        if self._text.startswith(("<(", ">("), self._at):
            return ""  # a process substitution is a word
        return next((op for op in _OPERATORS if self._text.startswith(op, self._at)), "")

    def _operator(self, operator: str) -> None:
        self._tokens.append(Token(operator, self._at, self._at + len(operator)))
        self._at += len(operator)

    def _word(self) -> None:
        start, pieces = self._at, list[Piece]()
        text = self._text
        while self._at < len(text):
            if text.startswith("\\\n", self._at):
                self._at += 2
                continue
            if text.startswith(("<(", ">("), self._at) and self._at == start:
                end = self._skip_balanced(self._at + 2, ")")
                pieces.append(Piece(text[self._at : end], is_quoted=False, is_expansion=True))
                self._at = end
                continue
            if text[self._at] in _META and not self._is_array_start(pieces):
                break
            pieces += self._next_pieces(pieces)
        token = Token(text[start : self._at], start, self._at, pieces)
        previous = self._tokens[-1].text if self._tokens else ""
        if previous in ("<<", "<<-") and not self._tokens[-1].is_word:
            self._heredocs.append((token, previous == "<<-"))
        self._tokens.append(token)

    def _is_array_start(self, pieces: list[Piece]) -> bool:
        """Return whether ``(`` here begins the elements of an array: ``NAME=(`` or ``NAME+=(``."""
        return (
            self._text[self._at] == "("
            and len(pieces) == 1
            and re.fullmatch(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=", pieces[0].text) is not None
        )

    def _next_pieces(self, pieces: list[Piece]) -> list[Piece]:
        text, character = self._text, self._text[self._at]
        if character == "(":  # of an array; kept as it is, and split again when it is assigned
            end = self._skip_balanced(self._at + 1, ")")
            self._at, start = end, self._at
            return [Piece(text[start:end], is_quoted=False, is_expansion=True)]
        if character == "\\":
            self._at += 2
            return [Piece(text[self._at - 1 : self._at], is_quoted=True)]
        if character == "'":
            end = self._find_end("'", self._at + 1)
            self._at, start = end + 1, self._at + 1
            return [Piece(text[start:end], is_quoted=True)]
        if character == '"':
            self._at += 1
            return self._double_quoted()
        if character in "$`":
            if text.startswith("$'", self._at):
                return [self._ansi_quoted()]
            if text.startswith('$"', self._at):
                self._at += 2
                return self._double_quoted()
            return [self._expansion(is_quoted=False)]
        match = _PLAIN.match(text, self._at)
        end = match.end() if match else self._at + 1
        self._at, start = end, self._at
        return [Piece(text[start:end], is_quoted=False)]

    def _find_end(self, quote: str, start: int) -> int:
        end = self._text.find(quote, start)
        if end < 0:
            raise self._source.error(start - 1, f"the quote {quote} is not closed", "close it")
        return end

    def _ansi_quoted(self) -> Piece:
        start, at = self._at, self._at + 2
        characters = []
        while at < len(self._text) and self._text[at] != "'":
            if self._text[at] == "\\":
                at += 1
                escaped = self._text[at : at + 1]
                characters.append(_ESCAPES.get(escaped, escaped if escaped in "\\'\"?" else f"\\{escaped}"))
            else:
                characters.append(self._text[at])
            at += 1
        if at >= len(self._text):
            raise self._source.error(start, "the quote ' is not closed", "close it")
        self._at = at + 1
        return Piece("".join(characters), is_quoted=True)

    def _double_quoted(self) -> list[Piece]:
        """Read up to the closing quote; an empty pair is an empty quoted piece."""
        opening, pieces, literal = self._at - 1, list[Piece](), list[str]()
        text = self._text
        while self._at < len(text) and text[self._at] != '"':
            if text[self._at] == "\\" and self._at + 1 < len(text):
                following = text[self._at + 1]
                literal.append("" if following == "\n" else following if following in '$`"\\' else f"\\{following}")
                self._at += 2
            elif text[self._at] in "$`":
                pieces += [Piece("".join(literal), is_quoted=True)] if literal else []
                literal = []
                pieces.append(self._expansion(is_quoted=True))
            else:
                literal.append(text[self._at])
                self._at += 1
        if self._at >= len(text):
            raise self._source.error(opening, 'the quote " is not closed', "close it")
        self._at += 1
        if literal or not pieces:
            pieces.append(Piece("".join(literal), is_quoted=True))
        return pieces

    def _expansion(self, *, is_quoted: bool) -> Piece:
        text, start = self._text, self._at
        if text[start] == "`":
            end = self._skip_balanced(start + 1, "`")
        elif text.startswith("${", start):
            end = self._skip_balanced(start + 2, "}")
        elif text.startswith("$(", start):
            end = self._skip_balanced(start + 2, ")")
        else:
            match = _NAME.match(text, start)
            if match is None:
                self._at += 1
                return Piece("$", is_quoted=is_quoted)
            end = match.end()
        self._at = end
        return Piece(text[start:end], is_quoted=is_quoted, is_expansion=True)

    def _skip_balanced(self, start: int, closer: str) -> int:
        """Return the offset after the ``closer`` of the expansion whose content starts at ``start``."""
        text, at, stack = self._text, start, [closer]
        while at < len(text):
            character, inner = text[at], stack[-1]
            if inner == "'":
                at = self._find_end("'", at)
                stack.pop()
            elif character == "\\":
                at += 1
            elif character == inner:
                stack.pop()
            elif character == "$" and text[at + 1 : at + 2] in ("(", "{"):
                stack.append(")" if text[at + 1] == "(" else "}")
                at += 1
            elif character == '"' or (character == "`" and "`" not in stack):
                stack.append(character)
            elif inner != '"' and character == "'" and closer != "}":
                stack.append("'")
            elif inner == ")" and character == "(":
                stack.append(")")
            at += 1
            if not stack:
                return at
        raise self._source.error(start, f"an expansion or a list has no closing {closer}", "close it")

    def _read_heredocs(self) -> None:
        for token, strips_tabs in self._heredocs:
            delimiter = "".join(piece.text for piece in token.pieces or [])
            start, lines = self._at, []
            while True:
                if self._at >= len(self._text):
                    raise self._source.error(start - 1, f"the here-document has no line {delimiter}", "add it")
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = end + 1
                if (line.lstrip("\t") if strips_tabs else line) == delimiter:
                    break
                lines.append(line)
            token.heredoc, token.heredoc_end = "".join(f"{line}\n" for line in lines), end
        self._heredocs.clear()

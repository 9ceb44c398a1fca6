"""The commands of a shell script: which there are, and whether they are inside a block."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clustertrain.submit.shell.words import REDIRECTIONS, Source, Token, split_tokens

_CLOSERS = {"if": "fi", "for": "done", "select": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}
_BETWEEN = frozenset({"then", "do", "else", "elif", "!"})
_SEPARATORS = frozenset({"\n", ";", "&"})
_CONNECTORS = frozenset({"&&", "||", "|", "|&"})
_CASE_ENDS = frozenset({";;", ";&", ";;&"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")


@dataclass
class Command:
    """A simple command."""

    words: list[Token] = field(default_factory=list)
    assignments: list[Token] = field(default_factory=list)
    redirections: list[tuple[str, Token | None]] = field(default_factory=list)
    before: str = ""
    """Operator that joins it to the command before it: ``&&``, ``||``, ``|``, or empty."""
    after: str = ""
    is_nested: bool = False
    """It is inside a block: a loop, a condition, a function, a subshell."""
    is_conditional: bool = False
    """It is inside an ``if`` or a ``case``, or behind ``||``."""
    start: int = 0
    end: int = 0

    @property
    def heredoc(self) -> str | None:
        """The here-document on standard input."""
        bodies = [target.heredoc for operator, target in self.redirections if operator in ("<<", "<<-") and target]
        return bodies[-1] if bodies else None


@dataclass
class Statement:
    """What stands between line breaks or semicolons outside of blocks."""

    commands: list[Command] = field(default_factory=list)
    block: str = ""
    """The first block in it: ``if``, ``for``, ``(``, ``function NAME`` and so on; empty: none."""
    start: int = 0
    end: int = 0
    is_background: bool = False


def split_statements(source: Source) -> list[Statement]:
    """Return the statements of ``source``.

    Raises:
        UsageError: a quote or a block does not end.
    """
    return _Parser(source).run()


class _Parser:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._tokens = split_tokens(source)
        self._statements: list[Statement] = []
        self._statement, self._command = Statement(), Command()
        # Closing words of the open blocks, with the offsets of their openings.
        self._stack: list[tuple[str, int]] = []
        self._connector = ""

    def run(self) -> list[Statement]:
        index = 0
        while index < len(self._tokens):
            index = self._step(index)
        if self._stack:
            closer, offset = self._stack[-1]
            raise self._source.error(offset, f"a block has no closing {closer}", "complete it")
        self._end_statement()
        return self._statements

    def _step(self, index: int) -> int:
        """Consume the token at ``index``, or several; return the index after them."""
        token = self._tokens[index]
        self._extend(token)
        if not token.is_word:
            return self._operator(token, index)
        if not (self._command.words or self._command.assignments):
            keyword = token.keyword
            if keyword in _CLOSERS:
                return self._open(keyword, index)
            if self._stack and keyword == self._stack[-1][0]:
                self._stack.pop()
                return index + 1
            if keyword in _BETWEEN and (self._stack or keyword == "!"):
                return index + 1
            if keyword == "function" and index + 1 < len(self._tokens):
                self._mark(f"function {self._tokens[index + 1].text}")
                return index + 2
            if keyword == "[[":
                return self._skip_to("]]", index)
        is_assignment = token.pieces and not token.pieces[0].is_quoted and _ASSIGNMENT.match(token.pieces[0].text)
        if is_assignment and not self._command.words:
            self._add(token, self._command.assignments)
            return index + 1
        self._add(token, self._command.words)
        return index + 1

    def _extend(self, token: Token) -> None:
        if token.text in _SEPARATORS and not token.is_word and not self._stack:
            return
        if not self._statement.end:
            self._statement.start = token.start
        self._statement.end = max(self._statement.end, token.end, token.heredoc_end)

    def _add(self, token: Token, place: list[Token]) -> None:
        if not (self._command.words or self._command.assignments or self._command.redirections):
            self._command.start = token.start
        self._command.end = max(token.end, token.heredoc_end)
        place.append(token)

    def _mark(self, block: str) -> None:
        self._statement.block = self._statement.block or block

    def _open(self, keyword: str, index: int) -> int:
        self._mark(keyword)
        self._stack.append((_CLOSERS[keyword], self._tokens[index].start))
        if keyword in ("for", "select"):
            return self._skip_to("do", index)
        return self._skip_pattern(self._skip_to("in", index)) if keyword == "case" else index + 1

    def _skip_to(self, keyword: str, index: int) -> int:
        """Return the index after the next word ``keyword``, and record the words before it as a command's."""
        opening = self._tokens[index].start
        is_test = keyword == "]]"
        while index < len(self._tokens):
            token = self._tokens[index]
            self._extend(token)
            index += 1
            if is_test and token.is_word:
                self._add(token, self._command.words)
            if token.is_word and token.keyword == keyword:
                return index
        raise self._source.error(opening, f"a block has no {keyword}", "complete it")

    def _skip_pattern(self, index: int) -> int:
        """Return the index after the pattern of a ``case``, or after its ``esac``."""
        while index < len(self._tokens):
            token = self._tokens[index]
            self._extend(token)
            index += 1
            if token.keyword == "esac":
                self._stack.pop()
                return index
            if token.text == ")" and not token.is_word:
                return index
        return index

    def _operator(self, token: Token, index: int) -> int:
        text = token.text
        if text in REDIRECTIONS:
            target = self._tokens[index + 1] if index + 1 < len(self._tokens) else None
            if target is None or not target.is_word:
                raise self._source.error(token.start, f"{text} names no file", "complete it")
            self._take_descriptor(token)
            self._command.redirections.append((text, target))
            self._command.end = max(self._command.end, target.end, target.heredoc_end)
            self._extend(target)
            return index + 2
        if text == "(":
            return self._parenthesis(index)
        if text == ")":
            if not self._stack or self._stack[-1][0] != ")":
                raise self._source.error(token.start, "a parenthesis ) is not opened", "remove it")
            self._end_command("")
            self._stack.pop()
            return index + 1
        if text in _CASE_ENDS:
            if not self._stack or self._stack[-1][0] != "esac":
                raise self._source.error(token.start, f"{text} outside of a case", "remove it")
            self._end_command("")
            return self._skip_pattern(index + 1)
        if text in _CONNECTORS:
            self._end_command(text)
            return self._skip_breaks(index + 1)
        self._end_command("&" if text == "&" else "")
        if not self._stack:
            self._statement.is_background |= text == "&"
            self._end_statement()
        return index + 1

    def _take_descriptor(self, token: Token) -> None:
        """Remove the number of a redirection (``2>``), which is a word of its own."""
        words = self._command.words
        if words and words[-1].end == token.start and words[-1].keyword.isdecimal():
            words.pop()

    def _parenthesis(self, index: int) -> int:
        words, token = self._command.words, self._tokens[index]
        following = self._tokens[index + 1] if index + 1 < len(self._tokens) else token
        if len(words) == 1 and not self._command.assignments and following.text == ")":
            self._mark(f"function {words[0].text}")
            self._command = Command()
            return index + 2
        if words or self._command.assignments:
            raise self._source.error(token.start, "a parenthesis ( inside a command", "quote it")
        self._mark("(")
        self._stack.append((")", token.start))
        return index + 1

    def _skip_breaks(self, index: int) -> int:
        while index < len(self._tokens) and self._tokens[index].text == "\n":
            index += 1
        return index

    def _end_command(self, connector: str) -> None:
        command = self._command
        command.before, command.after = self._connector, connector
        command.is_nested = bool(self._stack)
        command.is_conditional = any(closer in ("fi", "esac") for closer, _ in self._stack) or command.before == "||"
        if command.words or command.assignments or command.redirections:
            self._statement.commands.append(command)
        self._connector = connector if connector in _CONNECTORS else ""
        self._command = Command()

    def _end_statement(self) -> None:
        self._end_command("")
        if self._statement.end:
            self._statements.append(self._statement)
        self._statement = Statement()

"""The variables of a batch script: what is known of their values without executing anything.

A part of a word that only a shell can expand becomes a mark in the text, ``\\ue000`` NUMBER ``\\ue001``, which
:class:`Expansions` explains. So words pass through the parsers of launchers as plain text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clustertrain import reading
from clustertrain.errors import UsageError
from clustertrain.submit.shell.words import Piece, Source, Token, split_tokens

MARK = re.compile("\ue000(\\d+)\ue001")
_PARAMETER = re.compile(r"\$(?:(\w+|[@*#?$!-])|\{(\w+|[@*#?$!-])(?:\[([^]]*)\])?(?:(:?[-=?+])(.*))?\})", re.DOTALL)
_PATTERN = re.compile(r"[*?]|\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_SAME_EVERYWHERE = frozenset({"HOME", "USER", "LOGNAME", "PWD"})
_MAX_CHARACTERS = 16 * reading.MIB  # of all values together: a line can double a variable
_COMMANDS = {"pwd": "$PWD", "whoami": "$USER", "id -un": "$USER"}


@dataclass(frozen=True)
class Value:
    """What is known of a variable."""

    fields: tuple[str, ...]
    """One text, or the elements of an array, with marks."""
    line: int
    is_array: bool = False
    is_known: bool = True
    """False: it is set in a way that cannot be followed, such as inside a condition."""

    @property
    def text(self) -> str:
        return " ".join(self.fields)

    @property
    def is_literal(self) -> bool:
        return self.is_known and not MARK.search(self.text)


@dataclass(frozen=True)
class Expansion:
    """A part of a word that only a shell can expand."""

    text: str
    """As in the source."""
    line: int
    is_environment: bool
    """A variable of the user's environment, which the shell that gets the submit line has too."""
    reason: str
    """Why it is not replaced; empty: it is the same in every shell of the user."""


@dataclass
class Expansions:
    """All expansions of a script, by their numbers."""

    items: list[Expansion] = field(default_factory=list)

    def mark(self, text: str, line: int, *, is_environment: bool = False, reason: str) -> str:
        self.items.append(Expansion(text, line, is_environment, reason))
        return f"\ue000{len(self.items) - 1}\ue001"

    def find(self, text: str) -> list[Expansion]:
        return [self.items[int(match[1])] for match in MARK.finditer(text)]

    def show(self, text: str) -> str:
        """Return ``text`` with the source of its expansions."""
        return MARK.sub(lambda match: self.items[int(match[1])].text, text)

    def quote(self, text: str) -> str:
        """Return ``text`` as a word for a shell, which expands only variables of the user's environment."""
        parts = MARK.split(text)
        if len(parts) == 1:
            return shlex.quote(text)
        pieces = []
        for index, part in enumerate(parts):
            if index % 2 == 0:
                pieces.append(shlex.quote(part) if part else "")
            elif (item := self.items[int(part)]).is_environment:
                pieces.append(f'"{item.text}"')
            else:
                pieces.append(shlex.quote(item.text))
        return "".join(pieces)


class Scope:
    """The variables that the lines read so far have set, and words with their values.

    Args of the constructor:
        job: values of Slurm's variables that follow from the directives.
    """

    def __init__(self, job: Mapping[str, str], expansions: Expansions) -> None:
        self._job, self._expansions = job, expansions
        self._values: dict[str, Value] = {}
        self._characters = 0

    def find(self, name: str) -> Value | None:
        return self._values.get(name)

    def assign(self, name: str, value: Value) -> None:
        self._values[name] = value

    def forget(self, name: str, line: int) -> None:
        """Record that ``name`` is set on ``line`` in a way that cannot be followed."""
        self._values[name] = Value((), line, is_known=False)

    def read_assignment(self, token: Token, source: Source) -> tuple[str, Value]:
        """Return the name and the new value of ``NAME=VALUE``, ``NAME+=VALUE`` or ``NAME=(…)``."""
        line = source.line_at(token.start)
        pieces = list(token.pieces or [])
        head, _, rest = pieces[0].text.partition("=")
        name, appends = head.removesuffix("+"), head.endswith("+")
        pieces[0] = Piece(rest, is_quoted=False)
        old = self._values.get(name) if appends else None
        array = next((piece.text for piece in pieces if piece.is_expansion and piece.text.startswith("(")), None)
        if "[" in name or (old is not None and not old.is_known):
            return name.partition("[")[0], Value((), line, is_known=False)
        if array is not None:
            inner = Source(array[1:-1], source.name, line)
            fields = tuple(f for word in split_tokens(inner) if word.is_word for f in self.expand(word, inner))
            return name, Value((*(old.fields if old else ()), *fields), line, is_array=True)
        text = "".join(self._expand_piece(piece, line)[0] for piece in _with_home(pieces))
        return name, Value(((old.text if old else "") + text,), line)

    def expand(self, token: Token, source: Source) -> list[str]:
        """Return the words that ``token`` becomes, with marks."""
        line = source.line_at(token.start)
        fields, current, is_started = list[str](), "", False
        for piece in _with_home(list(token.pieces or [])):
            if piece.is_expansion and (elements := self._find_elements(piece)) is not None:
                if elements:
                    fields += [*([current + elements[0]] if len(elements) > 1 else []), *elements[1:-1]]
                    current = elements[-1] if len(elements) > 1 else current + elements[0]
                    is_started = True
                continue
            text, is_value = self._expand_piece(piece, line)
            if piece.is_quoted or not is_value:
                if not (piece.is_quoted or piece.is_expansion) and _PATTERN.search(text):
                    text = self._expansions.mark(text, line, reason="a pattern, which the shell replaces by file names")
                current += text
                is_started |= piece.is_quoted or bool(text)
                continue
            # The value of a variable outside of quotes is split at blanks.
            words = text.split()
            if text[:1].isspace() and is_started:
                fields.append(current)
                current, is_started = "", False
            for index, word in enumerate(words):
                if index:
                    fields.append(current)
                    current = ""
                current += word
                is_started = True
            if words and text[-1:].isspace():
                fields.append(current)
                current, is_started = "", False
        return [*fields, current] if is_started else fields

    def _find_elements(self, piece: Piece) -> list[str] | None:
        """Return the elements of the array that ``piece`` expands to; None if it is something else."""
        match = _PARAMETER.fullmatch(piece.text)
        if match is None or match[3] not in ("@", "*") or match[4]:
            return None
        value = self._values.get(match[2])
        if value is None or not value.is_known:
            return None
        self._count(value.text)
        return list(value.fields)

    def _expand_piece(self, piece: Piece, line: int) -> tuple[str, bool]:
        """Return the text of ``piece``, and whether it is the value of a variable."""
        text, is_value = self._find_text(piece, line)
        self._count(text)
        return text, is_value

    def _count(self, text: str) -> None:
        self._characters += len(text)
        if self._characters > _MAX_CHARACTERS:
            raise UsageError(
                "the values of the script's variables have more than 16 million characters together",
                fix="name the program itself: clustertrain submit -- COMMAND",
            )

    def _find_text(self, piece: Piece, line: int) -> tuple[str, bool]:
        if not piece.is_expansion:
            return piece.text, False
        match = _PARAMETER.fullmatch(piece.text)
        if match is None:
            return self._expand_command(piece.text, line), False
        name, index, operator, default = match[1] or match[2], match[3], match[4], match[5]
        if name[:1].isdigit() or not name[:1].isidentifier():
            reason = "an argument or a state of the batch script"
            return self._expansions.mark(piece.text, line, reason=reason), False
        value = self._values.get(name)
        if value is None and name in self._job:
            value = Value((self._job[name],), line)
        if value is not None and value.is_known:
            if operator is None and (index is None or (index.isdecimal() and int(index) < len(value.fields))):
                return value.fields[int(index or 0)] if value.fields else "", True
            if operator in (":-", "-", ":=", "=", ":?", "?") and value.text:
                return value.fields[0], True
        if name == "SLURM_SUBMIT_DIR" and operator is None:
            return self._expansions.mark("$PWD", line, is_environment=True, reason=""), False
        return self._mark_variable(piece.text, name, default or "", line), False

    def _expand_command(self, text: str, line: int) -> str:
        command = re.sub(r"^\$\(\s*|^`|\s*\)$|`$", "", text)
        if command in _COMMANDS:
            return self._expansions.mark(_COMMANDS[command], line, is_environment=True, reason="")
        reason = "arithmetic of the batch script" if text.startswith("$((") else "the output of a command"
        return self._expansions.mark(text, line, reason=reason)

    def _mark_variable(self, text: str, name: str, default: str, line: int) -> str:
        value = self._values.get(name)
        if name in _SAME_EVERYWHERE and not default and value is None:
            return self._expansions.mark(text, line, is_environment=True, reason="")
        if value is not None:
            how = "set" if value.is_known else "set in a way that is not followed"
            return self._expansions.mark(text, line, reason=f"{how} on line {value.line}")
        if name.startswith(("SLURM", "SBATCH")):
            return self._expansions.mark(text, line, reason="known only inside the job")
        is_simple = not re.search(r"\$[({0-9@*]|`", default)
        reason = "the shell that gets the submit line expands it" if is_simple else "not set in the script"
        return self._expansions.mark(text, line, is_environment=is_simple, reason=reason)


def _with_home(pieces: list[Piece]) -> Iterator[Piece]:
    """Iterate over ``pieces``, with ``~`` at the start as ``$HOME``."""
    for index, piece in enumerate(pieces):
        if index == 0 and not (piece.is_quoted or piece.is_expansion) and re.match(r"~(/|$)", piece.text):
            yield Piece("$HOME", is_quoted=True, is_expansion=True)
            yield Piece(piece.text[1:], is_quoted=False)
        else:
            yield piece

"""Launchers that a program would start itself: in the text of ``bash -c``, in a shell script, in a container.

Each rank runs the command, so each would start the launcher again. Scripts are read and not executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from clustertrain import proc, reading
from clustertrain.errors import UsageError
from clustertrain.submit.launchers.launcher_names import is_program, name_launcher, starts_with_launcher
from clustertrain.submit.program.command import find_shell_script
from clustertrain.submit.program.wrappers import CONTAINER_RUNTIMES, find_program
from clustertrain.submit.shell.expansion import MARK, Expansions, Scope
from clustertrain.submit.shell.statements import Command, Statement, split_statements
from clustertrain.submit.shell.words import Source

MAX_SCRIPT_BYTES = reading.MIB // 4
_MAX_DEPTH = 4  # scripts that start scripts
_MAX_SHOWN = 80  # characters of a line
_SHEBANG = re.compile(rb"#![^\n]*\b(?:ba|da|k|z)?sh\b")
_RESERVED = re.compile("[\ue000\ue001]")
_PREFIXES = frozenset({"builtin", "command", "exec"})
_TESTS = frozenset({"[", "[[", "test"})
_TEXT = "-c"  # name of a text that is no file


@dataclass(frozen=True)
class HiddenLauncher:
    """A launcher inside a program."""

    name: str
    holder: str = ""
    """The program of the command that would start it: ``bash``, ``apptainer``, ``env -S``."""
    script: str = ""
    """The shell script that starts it; empty: it is in the command itself."""
    line: int = 0
    text: str = ""
    """The command in the script."""
    is_conditional: bool = False
    """The script starts it only under a condition."""

    @property
    def place(self) -> str:
        return f"{self.script}, line {self.line}: {self.text}"


def find_hidden_launcher(command: Sequence[str], cwd: Path | None = None) -> HiddenLauncher | None:
    """Return the launcher that the program of ``command``, at its start or behind wrappers, would execute.

    Args:
        cwd: the folder in which the command runs; None: no script is read.
    """
    place, finder = find_program(command, starts_with_launcher), _Finder()
    if text := place.find_split_string():
        found, holder = finder.find(["sh", "-c", text], cwd), "env -S"
    else:
        inner = command[place.index :]
        found, holder = finder.find(inner, None if place.changes_folder else cwd), PurePath(inner[0]).name
    return replace(found, holder=holder) if found else None


def find_contained_command(command: Sequence[str]) -> list[str]:
    """Return the command that a container runtime at the start of ``command`` executes; empty: it is not found.

    The first program after the image is taken for it.
    """
    for index in range(2, len(command)):
        # A word after an option may be its value; the image stands between the options and the program.
        if is_program(command[index]) and (command[index - 1] == "--" or not command[index - 1].startswith("-")):
            return list(command[index:])
    return []


class _Finder:
    def __init__(self) -> None:
        self._depth = 0
        self._seen: set[Path] = set()

    def find(self, command: Sequence[str], cwd: Path | None) -> HiddenLauncher | None:
        """Return the launcher inside the program that ``command`` starts with."""
        name = PurePath(command[0]).name
        if name in CONTAINER_RUNTIMES:  # its scripts are the image's
            inner = find_contained_command(command)
            return self._judge(inner, None) if inner else None
        if name in proc.SHELLS:
            if (text := _find_text(command)) is not None:
                return next(self._search(text, _TEXT, cwd), None)
            index = find_shell_script(command)
            return None if index is None else self._read(command[index], cwd, needs_shebang=False)
        return self._read(command[0], cwd, needs_shebang=True) if "/" in command[0] else None

    def _judge(self, words: Sequence[str], cwd: Path | None) -> HiddenLauncher | None:
        """Return the launcher that ``words`` start, at once or inside another program."""
        place = find_program(words, starts_with_launcher)
        if text := place.find_split_string():
            return next(self._search(text, _TEXT, cwd), None)
        inner = words[place.index :]
        if name := name_launcher(inner):
            return HiddenLauncher(name)
        return self.find(inner, None if place.changes_folder else cwd)

    def _read(self, name: str, cwd: Path | None, *, needs_shebang: bool) -> HiddenLauncher | None:
        """Return the launcher that the shell script ``name`` starts, rather one without a condition."""
        if cwd is None or (cwd / name) in self._seen:
            return None
        self._seen.add(cwd / name)
        try:
            data = reading.read_bytes(cwd / name, MAX_SCRIPT_BYTES)
        except (OSError, ValueError):  # a missing one is refused elsewhere; a large one is not read
            return None
        is_script = _SHEBANG.match(data) or (not needs_shebang and not data.startswith(b"#!"))
        if b"\0" in data or not is_script:
            return None
        found = list(self._search(data.decode(errors="replace"), name, cwd))
        return next((launcher for launcher in found if not launcher.is_conditional), found[0] if found else None)

    def _search(self, text: str, name: str, cwd: Path | None) -> Iterator[HiddenLauncher]:
        """Iterate over the launchers that the shell script ``text`` starts."""
        if self._depth >= _MAX_DEPTH:
            return
        self._depth += 1
        source, scope = Source(_RESERVED.sub("\ufffd", text), name), Scope({}, Expansions())
        try:
            for statement in split_statements(source):
                yield from self._search_statement(statement, source, scope, cwd)
        except UsageError:  # a quote or a block does not end: the shell will refuse it
            return
        finally:
            self._depth -= 1

    def _search_statement(
        self, statement: Statement, source: Source, scope: Scope, cwd: Path | None
    ) -> Iterator[HiddenLauncher]:
        is_tested = False
        for command in statement.commands:
            words = _expand(command, scope, source)
            is_tested = (is_tested and command.before == "&&") or (bool(words) and words[0] in _TESTS)
            launcher = self._judge_command(words, command, cwd)
            if launcher is None:
                continue
            if not launcher.script and source.name != _TEXT:
                line, shown = source.line_at(command.start), _show(source.text[command.start : command.end])
                launcher = replace(launcher, script=source.name, line=line, text=shown)
            yield replace(launcher, is_conditional=launcher.is_conditional or command.is_conditional or is_tested)

    def _judge_command(self, words: list[str], command: Command, cwd: Path | None) -> HiddenLauncher | None:
        while len(words) > 1 and words[0] in _PREFIXES and not words[1].startswith("-"):
            words = words[1:]
        if not words or MARK.fullmatch(words[0]):
            return None
        if words[0] == "eval" and len(words) > 1:
            return next(self._search(" ".join(words[1:]), _TEXT, cwd), None)
        if words[0] in (".", "source") and len(words) > 1:
            words = ["bash", words[1]]
        if command.heredoc is not None and PurePath(words[0]).name in proc.SHELLS and find_shell_script(words) is None:
            return next(self._search(command.heredoc, _TEXT, cwd), None)
        return self._judge(words, cwd)


def _find_text(command: Sequence[str]) -> str | None:
    """Return the script in the argument of ``bash -c``."""
    flag = next((i for i, word in enumerate(command[1:], start=1) if not word.startswith("-")), len(command))
    has_text = any(re.fullmatch(r"-[a-z]*c", word) for word in command[1:flag])
    return command[flag] if has_text and flag < len(command) else None


def _show(text: str) -> str:
    line = " ".join(text.replace("\\\n", " ").split())
    return line if len(line) <= _MAX_SHOWN else f"{line[: _MAX_SHOWN - 1]}…"


def _expand(command: Command, scope: Scope, source: Source) -> list[str]:
    """Return the words of ``command`` with the values of known variables, and record the variables that it sets."""
    words = [word for token in command.words for word in scope.expand(token, source)]
    is_export = words[:1] == ["export"]
    tokens = command.words[1:] if is_export else command.assignments if not words else []
    for token in tokens:
        if not re.match(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=", token.text):
            continue
        name, value = scope.read_assignment(token, source)
        if command.is_conditional:
            scope.forget(name, source.line_at(token.start))
        else:
            scope.assign(name, value)
    return words

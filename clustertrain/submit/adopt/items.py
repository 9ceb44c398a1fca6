"""The commands of a batch script in order, each with what it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from clustertrain import proc
from clustertrain.errors import UsageError
from clustertrain.submit.adopt import program as programs
from clustertrain.submit.adopt.command_kinds import CommandKind, find_kind
from clustertrain.submit.adopt.program import Program
from clustertrain.submit.shell.expansion import MARK, Expansions, Scope, Value
from clustertrain.submit.shell.statements import Command, Statement, split_statements
from clustertrain.submit.shell.words import Source, Token

_MAX_SCRIPTS = 4  # `bash -c` inside `bash -c`
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Assigned:
    """A variable that a command sets."""

    name: str
    value: Value
    text: str
    """As in the source."""
    is_exported: bool


@dataclass
class Item:
    """A command, or a block of commands."""

    kind: CommandKind
    line: int
    text: str
    """As in the source."""
    certainty: int = 0
    """Of a training command."""
    words: list[str] = field(default_factory=list)
    """With marks, without launchers such as srun."""
    program: Program | None = None
    assigned: list[Assigned] = field(default_factory=list)
    block: str = ""
    notes: list[str] = field(default_factory=list)
    after: str = ""
    """Operator after the command."""
    before: str = ""
    writes_file: bool = False
    reads_file: bool = False


class ItemReader:
    """Reads the statements of a script and of the scripts in its strings."""

    def __init__(self, scope: Scope, expansions: Expansions) -> None:
        self._scope, self._expansions = scope, expansions

    def read(self, source: Source, depth: int = 0) -> Iterator[Item]:
        """Iterate over the items of ``source``.

        Raises:
            UsageError: the text is not a shell script, or a launcher has an option that cannot be honored.
        """
        for statement in split_statements(source):
            if statement.block:
                yield self._read_block(statement, source)
                continue
            parts = [self._read_command(command, source) for command in statement.commands]
            whole = self._join(parts, statement, source)
            for item, command in whole:
                inner = self._find_script(item, command, source, depth)
                if inner is None:
                    yield item
                else:
                    yield from self._read_inner(item, inner, depth)

    def _join(self, parts: list[Item], statement: Statement, source: Source) -> list[tuple[Item, Command]]:
        """Return the items of a statement: one, unless a part of it needs an item of its own."""
        commands = statement.commands
        kinds = {item.kind for item in parts}
        is_test = "neutral" in kinds and "training" not in kinds
        if len(parts) <= 1 or (kinds & {"training", "cd", "export", "assign"} and not is_test):
            return list(zip(parts, commands, strict=True))
        for assigned in (a for item in parts for a in item.assigned):
            self._scope.forget(assigned.name, parts[0].line)
        order: tuple[CommandKind, ...] = ("requeue", "chain", "setup", "set", "export", "assign", "cd", "exit")
        kind = "address" if "address" in kinds else next((k for k in order if k in kinds), parts[0].kind)
        kind = "setup" if kind in ("set", "export", "assign", "cd") else kind
        text = source.text[statement.start : statement.end]
        joined = Item(kind, parts[0].line, text, words=parts[0].words, block="&&" if kind == "exit" else "")
        return [(joined, commands[0])]

    def _read_command(self, command: Command, source: Source) -> Item:
        line = source.line_at(command.start)
        text = source.text[command.start : command.end]
        item = Item("setup", line, text, before=command.before, after=command.after)
        if not command.words:
            item.kind = "assign" if command.assignments else "print"
            item.assigned = self._assign(command.assignments, source, is_exported=False)
            return item
        words = [word for token in command.words for word in self._scope.expand(token, source)]
        prefix = [self._scope.read_assignment(token, source) for token in command.assignments]
        if not words:
            return item
        try:
            program = programs.peel(words)
        except UsageError as e:
            raise self.at_line(e, source, line) from e
        program.env = [f"{name}={value.text}" for name, value in prefix] + program.env
        targets = [(op, (target.text if target else "")) for op, target in command.redirections]
        item.reads_file = any(operator.startswith("<") for operator, _ in targets)
        item.writes_file = any(not operator.startswith("<") for operator, _ in targets)
        item.program, item.words = program, program.words
        item.kind, item.certainty = find_kind(program, targets)
        if item.kind == "export":
            item.assigned = self._read_export(command, source, words)
        return item

    def at_line(self, e: UsageError, source: Source, line: int) -> UsageError:
        """Return ``e`` with the place in the script."""
        fix = self._expansions.show(e.fix) if e.fix else None
        return UsageError(f"{source.name}, line {line}: {self._expansions.show(e.message)}", fix=fix)

    def _assign(self, tokens: list[Token], source: Source, *, is_exported: bool) -> list[Assigned]:
        assigned = []
        for token in tokens:
            name, value = self._scope.read_assignment(token, source)
            self._scope.assign(name, value)
            assigned.append(Assigned(name, value, token.text, is_exported))
        return assigned

    def _read_export(self, command: Command, source: Source, words: list[str]) -> list[Assigned]:
        """Read ``export``, ``declare`` and the like; ``read`` and ``mapfile`` set variables that are not followed."""
        line = source.line_at(command.start)
        builtin = words[0]
        tokens = command.words[1:]
        options = [token.text for token in tokens if token.text.startswith("-")]
        if builtin in ("read", "mapfile", "readarray"):
            for token in tokens:
                if _NAME.fullmatch(token.text):
                    self._scope.forget(token.text, line)
            return [
                Assigned(t.text, Value((), line, is_known=False), t.text, is_exported=False)
                for t in tokens if _NAME.fullmatch(t.text)
            ]  # fmt: skip
        is_exported = builtin == "export" or any("x" in option for option in options)
        assigned = []
        for token in tokens:
            if token.text.startswith("-"):
                continue
            if re.match(r"[A-Za-z_]\w*\+?=", token.text):
                assigned += self._assign([token], source, is_exported=is_exported)
            elif is_exported and _NAME.fullmatch(token.text):
                known = self._scope.find(token.text)
                value = known or Value((), line, is_known=False)
                assigned.append(Assigned(token.text, value, token.text, is_exported))
        return assigned

    def _read_block(self, statement: Statement, source: Source) -> Item:
        """Return a block as one item, whose kind follows from the commands in it."""
        line = source.line_at(statement.start)
        text = source.text[statement.start : statement.end]
        item = Item("setup", line, text, block=statement.block)
        kinds = set()
        for command in statement.commands:
            part = self._read_command(command, source)
            kinds.add(part.kind)
            if part.kind == "training" and item.kind != "training":
                item.kind, item.line, item.certainty = "training", part.line, part.certainty
                item.notes = [f"inside the block `{statement.block}` of line {line}"]
            for assigned in part.assigned:
                self._scope.forget(assigned.name, part.line)
            item.assigned += part.assigned
        if item.kind != "training":
            item.kind = _find_block_kind(kinds)
        return item

    def _find_script(self, item: Item, command: Command, source: Source, depth: int) -> Source | None:
        """Return the script that ``bash -c``, ``eval`` or ``bash <<EOF`` executes."""
        words = item.words
        if not words or depth >= _MAX_SCRIPTS:
            return None
        if words[0] == "eval" and len(words) > 1 and not MARK.fullmatch(" ".join(words[1:])):
            return Source(" ".join(words[1:]), source.name, item.line)
        if item.program is None or item.program.name not in proc.SHELLS:
            return None
        options = [word for word in words[1:] if word.startswith("-")]
        flag = next((index for index, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), None)
        if flag is not None and flag + 1 < len(words) and flag == len(options):
            return Source(words[flag + 1], source.name, item.line)
        if command.heredoc is not None and len(options) == len(words) - 1:
            return Source(command.heredoc, source.name, item.line + 1)
        return None

    def _read_inner(self, outer: Item, inner: Source, depth: int) -> Iterator[Item]:
        """Iterate over the items of a script inside ``outer``, which is started as ``outer`` is."""
        started, has_setup = outer.program, False
        for item in self.read(inner, depth + 1):
            has_setup |= item.kind in ("setup", "set", "export", "assign", "cd")
            if item.kind == "training" and item.program is not None and started is not None:
                item.program.srun = {**started.srun, **item.program.srun}
                item.program.launcher = item.program.launcher or started.launcher
                item.program.replaced = [*started.replaced, *item.program.replaced]
                item.program.env = [*started.env, *item.program.env]
                item.program.container = item.program.container or started.container
                if started.container is not None and has_setup:
                    item.program.warnings.append("the commands before it run on the node, outside the image")
                item.certainty = max(item.certainty, 3 if started.launcher else 0)
            item.before, item.after = item.before or outer.before, item.after or outer.after
            yield item


def _find_block_kind(kinds: set[CommandKind]) -> CommandKind:
    if "requeue" in kinds or "chain" in kinds:
        return "requeue" if "requeue" in kinds else "chain"
    if "address" in kinds:
        return "address"
    if kinds and kinds <= {"print", "neutral", "monitor", "exit", "trap"}:
        return "exit" if "exit" in kinds else "print"
    return "setup"

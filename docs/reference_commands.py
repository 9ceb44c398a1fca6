"""Writes docs/reference/cli.md and docs/reference/python-api.md from the code.

    python docs/reference_commands.py

tests/unit/test_docs.py fails if the pages are out of date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import clustertrain
from clustertrain.cli.common import CommandWithSubcommands
from clustertrain.cli.job_options import GroupedOption
from clustertrain.cli.main import COMMANDS, cli

FOLDER = Path(__file__).resolve().parent / "reference"
HEADER = "<!-- Written by docs/reference_commands.py from the code. -->\n"
EXIT_CODES = """## Exit codes

| code | meaning |
|-|-|
| 0 | success; for `wait`, `submit --wait` and `--follow`: every run completed |
| 1 | the command or the run failed |
| 2 | wrong usage |
| 75 | stopped on request with the state committed (controller, agent) |
| 78 | a wrong recipe, profile or environment: another attempt would fail the same way |
| 93 | must not be requeued: no progress, the budget is spent, or another attempt owns the run (controller, agent) |
| 130 | Ctrl-C; the run continues |
"""


def main() -> None:
    """Write both pages."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cli.md").write_text(cli_page())
    (FOLDER / "python-api.md").write_text(api_page())


def cli_page() -> str:
    """Return the page of all commands, their arguments and options."""
    parts = [
        f"{HEADER}\n# Command line",
        "RUN is a run id or a unique prefix of one, a job id (`123_4` for a task of an array), or `latest`. `latest` "
        "is the default except for `cancel`, `requeue` and `checkpoint prune`. Every reporting command accepts "
        "`--json`: one document on standard output, with units in the names of the keys.",
        EXIT_CODES.rstrip(),
    ]
    with click.Context(cli, info_name="clustertrain") as root:
        for name in COMMANDS:
            command = cli.get_command(root, name)
            assert command is not None
            parts.extend(_command_parts(command, name, root))
    return "\n\n".join(parts) + "\n"


def _command_parts(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    level = "##" if parent.parent is None else "###"
    usage = " ".join(command.collect_usage_pieces(context)).strip()
    yield f"{level} {context.command_path.removeprefix('clustertrain ')}"
    yield f"```text\n{context.command_path} {usage}\n```"
    if command.help:
        yield inspect.cleandoc(command.help)
    yield from _option_tables(command, context)
    subcommands = {}
    if isinstance(command, click.Group):
        subcommands = command.commands
    elif isinstance(command, CommandWithSubcommands):
        subcommands = command.subcommands
    for subname, subcommand in subcommands.items():
        yield from _command_parts(subcommand, subname, context)


def _option_tables(command: click.Command, context: click.Context) -> Iterator[str]:
    groups: dict[str, list[tuple[str, str]]] = {"": []}
    for option in (p for p in command.get_params(context) if isinstance(p, click.Option)):
        record = option.get_help_record(context)
        if record is not None and "--help" not in option.opts:
            groups.setdefault(option.group if isinstance(option, GroupedOption) else "", []).append(record)
    for title, records in groups.items():
        if records:
            rows = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in records]
            yield (f"*{title}*\n\n" if title else "") + "\n".join(["| option | meaning |", "|-|-|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def api_page() -> str:
    """Return the page of every public name of ``clustertrain``."""
    parts = [f"{HEADER}\n# Python API", inspect.cleandoc(str(clustertrain.__doc__))]
    for name in clustertrain.__all__:
        thing = getattr(clustertrain, name)
        if inspect.isclass(thing):
            parts.append(f"## `{name}`")
            parts.append(_docstring(thing))
            for attribute, member in vars(thing).items():
                if not attribute.startswith("_"):
                    parts.extend(_member_parts(name, attribute, member))
        elif inspect.isfunction(thing):
            parts.extend((f"## `{name}{_signature(thing)}`", _docstring(thing)))
        else:
            parts.extend((f"## `{name}`", "The version of the package."))
    return "\n\n".join(parts) + "\n"


def _member_parts(owner: str, name: str, member: object) -> Iterator[str]:
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if isinstance(member, property):
        yield f"### `{owner}.{name}`"
        yield _docstring(member)
    elif inspect.isfunction(member):
        yield f"### `{owner}.{name}{_signature(member)}`"
        yield _docstring(member)


def _signature(function: object) -> str:
    return str(inspect.signature(function)).replace("'", "")  # type: ignore[arg-type]


def _docstring(thing: object) -> str:
    """Return the docstring as Markdown: roles and double backticks as code, sections as lists."""
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    lines: list[str] = []
    in_section = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Raises|Returns|Yields):", line):
            lines.extend((f"**{line.removesuffix(':')}**", ""))
            in_section = True
        elif in_section and (entry := re.fullmatch(r" {4}(\w[\w, ]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif in_section and line.startswith("    "):
            lines.append(f"  {line.strip()}" if lines and lines[-1].startswith(("- ", "  ")) else line.strip())
        else:
            in_section = in_section and not line.strip()
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()

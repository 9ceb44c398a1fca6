"""The page of the command line, from the commands' own help."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import click

from clustertrain.cli.common import CommandWithSubcommands
from clustertrain.cli.job_options import GroupedOption
from clustertrain.cli.main import COMMANDS, cli

_HEADER = "<!-- Written by python -m docs.generate from clustertrain/cli. -->\n"
EXIT_CODES = (
    (0, "success; for `wait`, `submit --wait` and `--follow`: every run completed"),
    (1, "the command or the run failed"),
    (2, "wrong usage"),
    (75, "stopped on request (batch process, agent)"),
    (78, "a wrong recipe, profile or environment: another attempt would fail the same way"),
    (93, "must not be requeued: no progress, budget spent, or another attempt owns the run (batch process, agent)"),
    (130, "Ctrl-C; the run continues"),
)

_SHELL = """## Completion and manual pages

The shell completes commands, options, runs, recipe keys (`--set`), GPU types, profiles and checks. Add one line to its
configuration:

| shell | file | line |
|-|-|-|
| bash | `~/.bashrc` | `eval "$(clustertrain completion bash)"` |
| zsh | `~/.zshrc`, after `compinit` | `eval "$(clustertrain completion zsh)"` |
| fish | `~/.config/fish/config.fish` | `clustertrain completion fish \\| source` |

pip installs a manual page for each command. `man clustertrain-submit` finds it if the environment's `bin` folder is in
PATH."""


def render() -> str:
    """Return the page of all commands, their arguments and options."""
    parts = [
        f"{_HEADER}\n# Command line",
        "RUN is a run id or a unique prefix of one, a job id (`123_4` for a task of an array), or `latest`. `latest` "
        "is the default except for commands that cannot be undone or start something. Every reporting command accepts "
        "`--json`: one [document](json.md) on standard output, with units in the names of the keys.",
        _SHELL,
        "## Exit codes",
        "\n".join(["| code | meaning |", "|-|-|", *(f"| {code} | {text} |" for code, text in EXIT_CODES)]),
    ]
    with click.Context(cli, info_name="clustertrain", **cli.context_settings) as root:
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
        for paragraph in inspect.cleandoc(command.help).split("\n\n"):
            # After \b, click keeps the lines as they are.
            is_block = paragraph.startswith("\b\n")
            yield "```text\n" + paragraph.removeprefix("\b\n") + "\n```" if is_block else paragraph
    yield from _option_tables(command, context)
    subcommands: Mapping[str, click.Command] = {}
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

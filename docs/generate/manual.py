"""Manual pages of the commands, in the format of man(7), from the commands' own help.

click-man does the same without what this help has: sections of options, blocks of code, commands that are loaded on
demand, and backslashes in texts.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from clustertrain.cli.common import CommandWithSubcommands
from clustertrain.cli.job_options import GroupedOption
from clustertrain.cli.main import COMMANDS, cli
from docs.generate.commands import EXIT_CODES

ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = (
    (
        "CLUSTERTRAIN_HOME",
        "Folder of all runs: by default $XDG_DATA_HOME/clustertrain or ~/.local/share/clustertrain.",
    ),
    ("CLUSTERTRAIN_CLUSTER", "Name of the cluster profile, unless --cluster names one."),
    ("CLUSTERTRAIN_CLUSTER_PATH", "More folders with cluster profiles, separated by colons."),
    ("NO_COLOR", "If set, output has no colors."),
)


def render_pages() -> Mapping[str, str]:
    """Return the pages by file name: one for clustertrain, and one for each command with its subcommands."""
    with click.Context(cli, info_name="clustertrain", **cli.context_settings) as root:
        pages = {"clustertrain.1": _render_overview(root)}
        for name, (_, summary) in COMMANDS.items():
            command = cli.get_command(root, name)
            assert command is not None
            pages[f"clustertrain-{name}.1"] = _render_command(command, name, summary, root)
    return pages


def _render_overview(root: click.Context) -> str:
    lines = [*_title("clustertrain", "train PyTorch on Slurm, survive preemption, and see every GPU")]
    lines += [".SH SYNOPSIS", ".B clustertrain", r"\fICOMMAND\fP [\fIOPTIONS\fP] [\fIARGUMENTS\fP]"]
    lines += [".SH DESCRIPTION", *_text(cli.help or ""), ".SH COMMANDS"]
    for name, (_, summary) in COMMANDS.items():
        lines += [".TP", rf"\fBclustertrain\-{_escape(name)}\fP(1)", *_paragraph(summary)]
    lines += [".SH OPTIONS", *_options(cli, root), ".SH ENVIRONMENT"]
    for variable, text in _ENVIRONMENT:
        lines += [".TP", rf"\fB{variable}\fP", *_paragraph(text)]
    lines.append(".SH EXIT STATUS")
    for code, text in EXIT_CODES:
        lines += [".TP", rf"\fB{code}\fP", *_paragraph(text)]
    return "\n".join(lines) + "\n"


def _render_command(command: click.Command, name: str, summary: str, root: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=root)
    lines = [*_title(f"clustertrain-{name}", summary[0].lower() + summary[1:].removesuffix("."))]
    lines += [".SH SYNOPSIS", *_synopsis(command, context), ".SH DESCRIPTION", *_text(command.help or "")]
    lines += _option_sections(command, context)
    subcommands: Mapping[str, click.Command] = {}
    if isinstance(command, click.Group):
        subcommands = command.commands
    elif isinstance(command, CommandWithSubcommands):
        subcommands = command.subcommands
    if subcommands:
        lines.append(".SH COMMANDS")
    for subname, subcommand in subcommands.items():
        inner = click.Context(subcommand, info_name=subname, parent=context)
        lines += [
            f".SS {_escape(f'{name} {subname}')}",
            *_synopsis(subcommand, inner, f"clustertrain {name} {subname}"),
        ]
        lines += [*_text(subcommand.help or "")]
        lines += _options(subcommand, inner)
    return "\n".join([*lines, ".SH SEE ALSO", r"\fBclustertrain\fP(1)"]) + "\n"


def _title(name: str, summary: str) -> Iterator[str]:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    yield r".\" Written by python -m docs.generate from clustertrain/cli."
    yield f'.TH "{name.upper()}" "1" "" "clustertrain {version}" "clustertrain manual"'
    yield ".SH NAME"
    yield rf"{_escape(name)} \- {_escape(summary)}"


def _synopsis(command: click.Command, context: click.Context, path: str = "") -> Iterator[str]:
    yield f".B {_escape(path or context.command_path)}"
    yield _line(" ".join(command.collect_usage_pieces(context)).strip())


def _option_sections(command: click.Command, context: click.Context) -> Iterator[str]:
    groups: dict[str, list[click.Option]] = {"": []}
    for option in _visible_options(command, context):
        groups.setdefault(option.group if isinstance(option, GroupedOption) else "", []).append(option)
    yield ".SH OPTIONS"
    for title, options in groups.items():
        if title:
            yield f".SS {_escape(title)}"
        for option in options:
            yield from _option(option, context)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for option in _visible_options(command, context):
        yield from _option(option, context)


def _visible_options(command: click.Command, context: click.Context) -> Iterator[click.Option]:
    yield from (p for p in command.params if isinstance(p, click.Option) and not p.hidden)
    if command.add_help_option:
        # click keeps the help option of the first context that asks for it, whose names may differ from this one's.
        yield click.Option(context.help_option_names, is_flag=True, help="Show this message and exit.")


def _option(option: click.Option, context: click.Context) -> Iterator[str]:
    names, text = option.get_help_record(context) or ("", "")
    yield ".TP"
    # The names in bold, and the rest, which the user replaces, in italics.
    yield re.sub(
        r"(?<![\w-])(--?[\w-]+)|([^\s,/]+)",
        lambda m: rf"\fB{_escape(m[1])}\fP" if m[1] else rf"\fI{_escape(m[2])}\fP",
        names,
    )
    yield from _paragraph(text)


def _text(help_text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(help_text).split("\n\n"):
        yield ".PP"
        if paragraph.startswith("\b\n"):  # after \b, click keeps the lines as they are
            yield from (".RS 4", ".nf", *(_line(line) for line in paragraph.split("\n")[1:]), ".fi", ".RE")
        else:
            yield from _paragraph(paragraph)


def _paragraph(text: str) -> Iterator[str]:
    yield _guard(re.sub(r"`([^`]+)`", r"\\fB\1\\fP", _escape(" ".join(text.split()))))


def _line(text: str) -> str:
    return _guard(_escape(text))


def _escape(text: str) -> str:
    return text.replace("\\", r"\e").replace("-", r"\-").replace("…", "...")


def _guard(line: str) -> str:
    """Keep a line that begins like a request from being one."""
    return rf"\&{line}" if line.startswith((".", "'")) else line

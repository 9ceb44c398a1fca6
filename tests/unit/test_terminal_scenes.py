"""The sheets of terminal pictures: each line names a command that exists."""

from __future__ import annotations

import shlex

import click

from clustertrain.cli.main import cli
from docs.terminal_scenes import MADE_UP, NEEDS, SHEETS, SLURM, list_sheets


def test_each_line_names_a_command() -> None:
    drawn = set()
    for line in (line for lines in SHEETS.values() for line in lines):
        words = shlex.split(line.partition(" | ")[0], comments=True)
        if words[:1] == ["clustertrain"] and words[1:]:
            name = words[1]
            assert name.startswith("-") or name == "stauts" or cli.get_command(click.Context(cli), name), line
            drawn.add(name)
    assert drawn >= set(cli.list_commands(click.Context(cli)))


def test_needs_and_kinds_name_sheets() -> None:
    sheets = list(list_sheets())
    assert {SLURM, *MADE_UP, *NEEDS} <= set(sheets)
    for sheet, needs in NEEDS.items():
        assert all(sheets.index(need) < sheets.index(sheet) for need in needs)

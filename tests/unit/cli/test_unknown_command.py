"""A command that does not exist: the error names the one that does it."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from clustertrain.cli.main import _ELSEWHERE, COMMANDS, cli


def call(*argv: str) -> str:
    result = CliRunner().invoke(cli, argv)
    assert result.exit_code == 2
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("stauts", "did you mean status?"),
        ("doctor", "did you mean version -v or diagnose or cluster detect?"),
        ("clean", "did you mean rm?"),
        ("ps", "did you mean list?"),
        ("zzz", "known: adopt, cancel,"),
    ],
)
def test_error_suggests_a_command(name: str, suggestion: str) -> None:
    assert f"No such command '{name}': {suggestion}" in call(name)


def test_suggested_commands_and_options_exist() -> None:
    for name, suggestions in _ELSEWHERE.items():
        assert name not in COMMANDS
        for command, *rest in (text.split() for text in suggestions):
            if command.startswith("-"):
                continue
            found = cli.get_command(click.Context(cli), command)
            assert found is not None, command
            options = {option for parameter in found.params for option in parameter.opts}
            nested = set(found.commands) if isinstance(found, click.Group) else set()
            assert set(rest) <= options | nested, (command, rest)

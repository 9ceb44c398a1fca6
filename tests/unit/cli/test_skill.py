"""The skill file and AGENTS.md: their commands exist with the options that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from clustertrain.cli.main import cli
from clustertrain.cli.skill import SKILL, skill
from tests.paths import ROOT

GUIDE = ROOT / "docs" / "guides" / "agents.md"
PAGES = [ROOT / SKILL, GUIDE]


def list_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each command of a page: in its shell blocks, and as code in sentences."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = re.findall(r"`(clustertrain [^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [*"".join(blocks).splitlines(), *code]:
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        argv: list[str] = []
        for word in [*words, ";"]:  # a pipe, a redirection or $(…) ends a command
            if not set(word) <= set("();<>|&"):
                argv.append(word)
                continue
            if argv and argv[0] == "clustertrain":
                yield argv[1:]
            argv = []


def parse(argv: list[str]) -> None:
    """Parse a command line as the program would, and run nothing. Raise click.UsageError for an unknown option."""
    context, command = click.Context(cli, info_name="clustertrain", **cli.context_settings), cli
    while isinstance(command, click.Group):
        name, found, argv = command.resolve_command(context, argv)
        assert found is not None and name is not None
        command = found
        if not isinstance(command, click.Group):
            command.make_context(name, argv, parent=context)
            return
        context = click.Context(command, info_name=name, parent=context)
        assert argv, f"{name} alone only prints its help"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_of_the_page_parse(page: Path) -> None:
    commands = list(list_commands(page.read_text()))
    assert len(commands) > 4
    for argv in commands:
        try:
            parse(argv)
        except click.ClickException as e:
            pytest.fail(f"{shlex.join(argv)}: {e.format_message()}")


def test_a_wrong_option_would_be_found() -> None:
    with pytest.raises(click.UsageError, match="no-such"):
        parse(["list", "--no-such"])
    with pytest.raises(click.UsageError):
        parse(["lists"])


def test_skill_has_a_name_and_says_when_to_use_it() -> None:
    text = CliRunner().invoke(skill, standalone_mode=False).stdout
    assert text == (ROOT / SKILL).read_text()
    header = dict(line.split(": ", 1) for line in text.split("---\n")[1].splitlines())
    assert header["name"] == "clustertrain" == (ROOT / SKILL).parent.name
    assert "Use when" in header["description"] and len(header["description"]) < 1024


def test_keys_that_the_skill_names_are_in_the_documents() -> None:
    from clustertrain.report.documents.schemas import build_schema

    text = (ROOT / SKILL).read_text()
    status, telemetry = build_schema("status"), build_schema("telemetry")
    for key in ("state", "failure", "undecided_reason", "eta_s", "attempts", "goodput"):
        assert key in text and key in status["properties"]
    assert {"insights", "goodput", "training", "waste"} <= telemetry["properties"].keys()
    assert "mfu" in telemetry["$defs"]["TrainingSummary"]["properties"]
    assert "by_cause" in telemetry["$defs"]["Waste"]["properties"]


def test_agents_page_is_short_and_agrees_with_the_makefile() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 80
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:clustertrain|docs|tests|slurm|templates|skills)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path

"""``clustertrain skill``: print the skill file for agents that use clustertrain."""

from __future__ import annotations

import click

from clustertrain.errors import ConfigError

SKILL = "skills/clustertrain/SKILL.md"


@click.command()
def skill() -> None:
    """Print the skill file for agents: how to submit, watch and diagnose runs.

    \b
    mkdir -p .claude/skills/clustertrain
    clustertrain skill > .claude/skills/clustertrain/SKILL.md
    """
    click.echo(read_skill(), nl=False)


def read_skill() -> str:
    """Return the skill file. Raise ConfigError if the installation is incomplete."""
    from clustertrain.submit.templates import find_template_folder

    path = find_template_folder().parent / SKILL  # beside the templates, in a wheel and in a checkout
    if not path.is_file():
        raise ConfigError(f"{path} is missing", fix="reinstall clustertrain")
    return path.read_text()

"""``clustertrain demo``: a small run on this machine that is preempted, resumes and completes."""

from __future__ import annotations

import sys
from typing import cast

import click

EXIT_INTERRUPTED = 130
RECIPE = "demo.toml"  # in the templates


@click.command()
def demo() -> int:
    """Train a small model on this machine's CPU: 2 nodes x 2 ranks, preempted once, resumed, completed.

    It takes a few minutes, and needs no GPU and no Slurm. Afterwards it shows the run's status and telemetry.
    """
    from clustertrain import extras
    from clustertrain.cli.jobs import status
    from clustertrain.cli.submit import submit
    from clustertrain.cli.telemetry import telemetry
    from clustertrain.run.lookup import list_runs
    from clustertrain.submit.templates import find_template_folder

    extras.require("torch", "demo")
    recipe = find_template_folder() / RECIPE
    sys.argv = [sys.argv[0], "submit", "--follow", str(recipe)]  # what the run records as its command
    click.echo(f"$ clustertrain submit --follow {recipe}", err=True)
    before = {run.id for run in list_runs()}
    code = cast(int, submit.main(sys.argv[2:], standalone_mode=False))
    new = [run.id for run in list_runs() if run.id.startswith("demo-") and run.id not in before]
    if code == EXIT_INTERRUPTED or not new:
        return code
    for command, argv in ((status, [new[-1]]), (telemetry, [new[-1], "--brief"])):
        click.echo(f"\n$ clustertrain {' '.join([str(command.name), *argv])}", err=True)
        command.main(argv, standalone_mode=False)
    return code

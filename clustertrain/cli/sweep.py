"""``clustertrain sweep``: a run for each point of a grid, and what came of them. ``submit --sweep`` is the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from clustertrain import clock
from clustertrain.cli.common import json_option, print_json
from clustertrain.cli.submit import CONTEXT_SETTINGS, TargetCommand, build_request, job_options, run_sweep
from clustertrain.cli.telemetry import CommandWithSubcommands
from clustertrain.errors import AmbiguousName, NotFound, UsageError

WATCH_S = 2.0


class SweepCommand(TargetCommand, CommandWithSubcommands):
    """``sweep RECIPE.toml --grid …`` and ``sweep show SWEEP``."""


@click.command(cls=SweepCommand, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY.PATH=V,V,…",
    help="A run for each value; of several keys for each combination. KEY=log:1e-5:1e-2:7 is seven values, log-spaced.",
)
@click.option("--at-once", type=click.IntRange(min=1), metavar="K", help="Runs at a time; default: all, locally one.")
@click.option("--dry-run", is_flag=True, help="Print the array's script and the first run's; make nothing.")
@click.option("--wait", "wait", is_flag=True, help="Wait for the end of all; exit 0 only if all completed.")
@job_options
def sweep(grid: tuple[str, ...], at_once: int | None, dry_run: bool, wait: bool, **options: Any) -> int:
    """Submit a run for each point of a grid, as one job array; `sweep show` has the results.

    RECIPE.toml and SCRIPT.py are as `submit` takes them, and so are all its options; before SCRIPT.py, since all after
    it belongs to the script.
    """
    if not grid:
        raise _missing_grid_error(options["target"], options["args"])
    as_json = options["as_json"]
    return run_sweep(build_request(options), grid, at_once, as_json, dry_run=dry_run, wait=wait, option="--grid")


def _missing_grid_error(target: str | None, args: tuple[str, ...]) -> UsageError:
    if any(arg.partition("=")[0] == "--grid" for arg in args):
        return UsageError(
            f"sweep: --grid stands behind {target}, and what stands there belongs to the script",
            fix=f"clustertrain sweep --grid … {target}",
        )
    return UsageError("sweep: no --grid", fix="name a key and its values, as --grid optim.lr=1e-4,3e-4,1e-3")


@click.command()
@click.argument("name", metavar="[SWEEP]", default="latest")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until all runs have ended.")
@json_option
def show(name: str, watch: bool, as_json: bool) -> int:
    """The runs of SWEEP with their values and results, the best one first; while they run, too.

    SWEEP is the name that `sweep` printed, a unique prefix of it, the array's job id, or `latest` (the default).
    """
    from clustertrain.report.runs.sweep import SweepReader, render
    from clustertrain.report.terminal import emit, glyphs, make_console
    from clustertrain.run.run_dir import explain_permission_errors

    if watch and as_json:
        raise UsageError("--watch and --json: choose one")
    with explain_permission_errors():
        reader = SweepReader(_find_sweep(name))
        if as_json:
            print_json(reader.read())
            return 0
        console = make_console(rows=True)
        if watch and not console.is_terminal:
            raise UsageError("--watch needs a terminal", fix="use `clustertrain wait` and `sweep show`, or --json")
        if watch:
            return _watch(reader, console)
        emit(console, *render(reader.read(), console.width, glyphs(console)))
    return 0


def _find_sweep(name: str) -> Path:
    """Among my own sweeps, else, for a job id, through the job's working directory in Slurm.

    Raises:
        NotFound, Ambiguous, UsageError: as :func:`clustertrain.run.lookup.resolve_sweep`.
    """
    from clustertrain.run.lookup import list_sweep_runs, resolve_sweep
    from clustertrain.scheduler.slurm import find_work_dir

    try:
        return resolve_sweep(name)
    except AmbiguousName:
        raise
    except NotFound:
        folder = find_work_dir(name) if re.fullmatch(r"\d+(_\d+)?", name) else None
        if folder is None or not list_sweep_runs(folder):
            raise
        return folder


def _watch(reader: Any, console: Any) -> int:
    """Until all runs have ended. Ctrl-C ends the watching, not the runs."""
    from rich.console import Group
    from rich.live import Live

    from clustertrain.report.runs.sweep import render
    from clustertrain.report.terminal import glyphs

    try:
        with Live(console=console, auto_refresh=False) as screen:
            while True:
                results = reader.read()
                screen.update(Group(*render(results, console.width, glyphs(console))), refresh=True)
                if results.final:
                    return 0
                clock.sleep(WATCH_S)
    except KeyboardInterrupt:
        return 130


sweep.subcommands["show"] = show

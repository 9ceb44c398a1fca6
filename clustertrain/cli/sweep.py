"""``clustertrain sweep``: submit one run per point of a grid, and show the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli import common
from clustertrain.cli.common import CommandWithSubcommands, json_option, print_json
from clustertrain.cli.completion import complete_sweeps
from clustertrain.cli.job_options import CONTEXT_SETTINGS, POSITIVE, TargetCommand, build_request, job_options
from clustertrain.cli.progress import ProgressBar
from clustertrain.cli.submit import format_training
from clustertrain.errors import AmbiguousName, NotFound, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clustertrain.submit.request import SubmitRequest

WATCH_S = 2.0


class SweepCommand(TargetCommand, CommandWithSubcommands):
    """``sweep RECIPE.toml --grid …`` and ``sweep show SWEEP``."""


@click.command(cls=SweepCommand, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY.PATH=V,V,…",
    help="Values of a key. Several keys give every combination. KEY=log:1e-5:1e-2:7 is seven log-spaced values.",
)
@click.option(
    "--at-once", type=POSITIVE, metavar="K", help="Maximum number of concurrent runs (default: all; locally one)."
)
@click.option("--dry-run", is_flag=True, help="Print the array's script and the first run's; create nothing.")
@click.option("--wait", "wait", is_flag=True, help="Wait for all runs to end; exit 0 only if all completed.")
@job_options
def sweep(grid: tuple[str, ...], at_once: int | None, dry_run: bool, wait: bool, **options: Any) -> int:
    """Submit one run per point of a grid, as one job array.

    RECIPE.toml, SCRIPT.py and the options are those of `submit`. Put options before SCRIPT.py; everything after it is
    passed to the script. `sweep show` shows the results.

    \b
    clustertrain sweep recipe.toml --grid optim.lr=log:1e-4:1e-2:5 --gpus 8
    clustertrain sweep recipe.toml --grid optim.lr=1e-4,3e-4 --grid train.seed=1,2
    clustertrain sweep show
    """
    if not grid:
        raise _missing_grid_error(options["target"], options["args"])
    as_json = options["as_json"]
    request = build_request(options)
    if dry_run:
        return _dry_run(request, grid, at_once, as_json)
    from clustertrain.submit.sweep import format_values, submit_sweep

    with ProgressBar("packing the environment") as bar:
        result = submit_sweep(request, grid, at_once, bar)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        from clustertrain.report.documents.submissions import SubmittedSweep, SweepRun

        runs = tuple(
            SweepRun(run=s.run.id, job_id=s.job_id, state=s.state, run_dir=str(s.run.path), values=dict(values))
            for s, values in result.runs
        )
        document = SubmittedSweep(
            sweep=result.folder.name,
            job_id=result.job_id,
            backend=result.backend,
            sweep_dir=str(result.folder),
            runs=runs,
        )
        print_json("sweep", document)
    else:
        click.echo(f"sweep {result.folder.name}" + (f"  job {result.job_id}" if result.job_id else ""))
        for submitted, values in result.runs:
            click.echo(f"run {submitted.run.id}  job {submitted.job_id}  {format_values(values)}")
    if not wait:
        return 0
    from clustertrain.cli.jobs import wait_for

    return int(wait_for([submitted.run for submitted, _ in result.runs], result.folder.name))


def _missing_grid_error(target: str | None, args: tuple[str, ...]) -> UsageError:
    if any(arg.partition("=")[0] == "--grid" for arg in args):
        return UsageError(
            f"sweep: --grid after {target} would be passed to the script",
            fix=f"put it before: clustertrain sweep --grid … {target}",
        )
    return UsageError("sweep: no --grid", fix="name a key and its values, for example --grid optim.lr=1e-4,3e-4,1e-3")


def _dry_run(request: SubmitRequest, grid: tuple[str, ...], at_once: int | None, as_json: bool) -> int:
    """Print the array's script and the first run's; with --json, the scripts of all runs."""
    from clustertrain.submit.sweep import dry_run_sweep, format_values

    preview = dry_run_sweep(request, grid, at_once)
    if as_json:
        from clustertrain.report.documents.submissions import SweepPreview, SweepRunPreview

        runs = tuple(
            SweepRunPreview(values=dict(values), script=run.script, plan=run.plan) for run, values in preview.runs
        )
        print_json("sweep-dry-run", SweepPreview(script=preview.script, runs=runs))
        return 0
    first, _ = preview.runs[0]
    lines = [f"run {n}: {format_values(values)}" for n, (_, values) in enumerate(preview.runs)]
    for line in (*lines, *format_training(first.plan), *first.plan.reasons, *preview.notes):
        click.echo(line, err=True)
    click.echo(f"{preview.script}\n# Run 0:\n\n{first.script}" if preview.script else first.script, nl=False)
    return 0


@click.command()
@click.argument("name", metavar="[SWEEP]", default="latest", shell_complete=complete_sweeps)
@click.option("--watch", is_flag=True, help="Refresh every two seconds until all runs have ended.")
@json_option
def show(name: str, watch: bool, as_json: bool) -> int:
    """Show the runs of SWEEP with their values and results, best first. Works while they run.

    SWEEP is the name that `sweep` printed, a unique prefix of it, the job id of the array, or `latest` (the default).
    """
    from clustertrain.report.runs.sweep import SweepReader, render
    from clustertrain.report.terminal import emit, glyphs, make_console
    from clustertrain.run.run_dir import explain_permission_errors

    if watch and as_json:
        raise UsageError("--watch and --json exclude each other", fix="use one of them")
    with explain_permission_errors():
        reader = SweepReader(_find_sweep(name))
        if as_json:
            print_json("sweep-show", reader.read())
            return 0
        console = make_console(rows=True)
        if watch and not console.is_terminal:
            raise UsageError("--watch needs a terminal", fix="use `clustertrain wait` and `sweep show`, or --json")
        if watch:
            from rich.console import Group

            def read() -> tuple[RenderableType, bool]:
                results = reader.read()
                return Group(*render(results, console.width, glyphs(console))), results.is_final

            return common.watch(console, WATCH_S, read)
        emit(console, *render(reader.read(), console.width, glyphs(console)))
    return 0


def _find_sweep(name: str) -> Path:
    """Find a sweep among the user's own or, for a job id, through the job's working directory in Slurm.

    Raises:
        NotFound, AmbiguousName, UsageError: see :func:`clustertrain.run.lookup.resolve_sweep`.
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


sweep.subcommands["show"] = show

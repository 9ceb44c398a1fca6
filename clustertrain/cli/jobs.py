"""Job control across attempts: list, status, wait, cancel, requeue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from clustertrain import clock
from clustertrain.cli.common import (
    echo_next_steps,
    find_run,
    find_runs,
    json_option,
    print_json,
    required_run_argument,
    run_argument,
    watch,
)
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import ClusterTrainError, UsageError
from clustertrain.run import state
from clustertrain.run.run_dir import RunDir, explain_permission_errors

if TYPE_CHECKING:
    from rich.console import RenderableType


MIN_POLL_S, MAX_POLL_S = 0.5, 15.0
WATCH_INTERVAL_S = 5.0  # each status asks the scheduler


@click.command("list")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    default=20,
    show_default=True,
    help="Maximum number of runs.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only the ids, one per line.")
@click.option(
    "--state",
    "states",
    type=click.Choice(list(state.DESCRIPTIONS)),
    multiple=True,
    help="Only runs in this state; can be repeated.",
)
@click.option("--since", metavar="TIME", help="Only runs submitted in the last 12h or 7d, or since '2026-01-31 14:30'.")
@click.option("--recipe", metavar="HASH", help="Only runs whose recipe hash starts with HASH.")
@click.option("--same-as", metavar="RUN", shell_complete=complete_runs, help="Only runs of the same recipe as RUN.")
@json_option
def list_(
    limit: int,
    quiet: bool,
    states: tuple[str, ...],
    since: str | None,
    recipe: str | None,
    same_as: str | None,
    as_json: bool,
) -> None:
    """List your runs, newest first, and in a shared home those of other users that you may read.

    \b
    clustertrain list --state failed --since 7d
    clustertrain cancel $(clustertrain list -q --state pending)
    """
    from clustertrain.cli.times import parse_moment
    from clustertrain.scheduler.run_list import RunFilter, select_runs, select_statuses
    from clustertrain.scheduler.run_status import Unreadable

    if quiet and as_json:
        raise UsageError("--quiet and --json exclude each other", fix="use one of them")
    now = clock.now()
    since_t = parse_moment(since, "--since", now) if since is not None else None
    selection = RunFilter(_parse_recipe_hash(recipe, same_as), frozenset(states), since_t)
    if quiet and not states:  # without a query to the scheduler
        click.echo("".join(f"{run.id}\n" for run in select_runs(selection)[:limit]), nl=False)
        return
    statuses = select_statuses(selection, limit)
    if quiet:
        click.echo("".join(f"{status.run.id}\n" for status in statuses), nl=False)
        return
    if as_json:
        from clustertrain.report.documents.runs import build_list

        print_json("list", build_list(statuses, now))
        return
    if not statuses and selection != RunFilter():
        click.echo("no run matches", err=True)
        return
    from rich.console import Group
    from rich.text import Text

    from clustertrain.report.progress import load_progress
    from clustertrain.report.status import format_remarks, runs_table
    from clustertrain.report.terminal import emit, make_console

    readable = [(x, load_progress(x, now, with_failure=False)) for x in statuses if not isinstance(x, Unreadable)]
    # Below the table, since a reason is a sentence.
    unreadable = [Text(f"{x.run.id}  unreadable: {x.error}") for x in statuses if isinstance(x, Unreadable)]
    console = make_console(rows=True)
    table = [runs_table(readable, console.width, now)] if readable or not unreadable else []
    emit(console, Group(*table, *unreadable, *format_remarks([x for x, _ in readable])))


def _parse_recipe_hash(recipe: str | None, same_as: str | None) -> str:
    """Return the prefix of the recipe hash that the options name; empty if they name none."""
    from clustertrain.run.recipe_hash import load_recipe_hash

    if recipe is not None and same_as is not None:
        raise UsageError("--recipe and --same-as exclude each other", fix="use one of them")
    if recipe is None and same_as is None:
        return ""
    with explain_permission_errors():
        hash_prefix = recipe if recipe is not None else load_recipe_hash(find_run(str(same_as)))
    if not hash_prefix or set(hash_prefix) - set("0123456789abcdef"):
        raise UsageError(
            f"--recipe {hash_prefix!r} is not a hash", fix="`list --json` and `status --json` show it as recipe_hash"
        )
    return hash_prefix


@click.command()
@run_argument
@click.option("--watch", "follow", is_flag=True, help="Refresh every 5 s until the run ends; Ctrl-C stops watching.")
@json_option
def status(name: str, follow: bool, as_json: bool) -> int:
    """Show the progress, loss and attempts of RUN, why it failed, its predicted and measured speed, and where the time
    went."""
    from clustertrain.report import plan_vs_measured
    from clustertrain.report.progress import load_progress
    from clustertrain.scheduler.run_status import run_status

    run = find_run(name)
    if as_json and not follow:
        from clustertrain.report.documents.status import build_status

        with explain_permission_errors():
            document = build_status(run_status(run))
        print_json("status", document)
        return 0
    from clustertrain.report.status import render
    from clustertrain.report.terminal import emit, glyphs, make_console

    console = make_console(rows=True)

    if follow and (as_json or not console.is_terminal):
        raise UsageError("status --watch needs a terminal", fix="poll `status --json`, or use `wait`")

    def show() -> tuple[RenderableType, bool]:
        """Return the status as it is now, and whether it is the last one."""
        t = clock.now()
        with explain_permission_errors():
            current = run_status(run)
            progress, comparison = load_progress(current, t), plan_vs_measured.compare_run(run)
        return render(current, progress, comparison, console.width, glyphs(console), t), current.is_final

    if follow:
        return watch(console, WATCH_INTERVAL_S, show)
    emit(console, show()[0])
    return 0


def wait_for(runs: Sequence[RunDir], name: str, *, as_json: bool = False) -> int:
    """Block until all runs have ended. Ctrl-C stops the waiting, not the runs.

    Args:
        runs: the runs to wait for.
        name: how the user named them together.
        as_json: print the document ``wait`` at the end.

    Returns:
        The exit code: 0 only if all runs completed.
    """
    from clustertrain.report.documents.runs import EndedRun, EndedRuns
    from clustertrain.scheduler.run_status import Unreadable, run_statuses

    poll_s, remaining = MIN_POLL_S, list(runs)
    ended: list[EndedRun] = []
    try:
        while True:
            for current in run_statuses(remaining):
                if isinstance(current, Unreadable):
                    raise ClusterTrainError(f"{current.run.id}: {current.error}", fix=current.fix)
                if current.is_final:
                    click.echo(": ".join(filter(None, (current.run.id, current.state, current.end_reason))), err=True)
                    if current.state == state.FAILED:
                        echo_next_steps(current.run)
                    ended.append(EndedRun(run=current.run.id, state=current.state, reason=current.end_reason or None))
                    remaining.remove(current.run)
            if not remaining:
                if as_json:
                    print_json("wait", EndedRuns(runs=tuple(ended)))
                return 0 if all(run.state == state.COMPLETED for run in ended) else 1
            clock.sleep(poll_s)
            poll_s = min(poll_s * 1.5, MAX_POLL_S)
    except KeyboardInterrupt:
        click.echo(f"{name} continues; `clustertrain cancel {name}` ends it", err=True)
        return 130


@click.command()
@click.argument("names", metavar="[RUN]…", nargs=-1, shell_complete=complete_runs)
@json_option
def wait(names: tuple[str, ...], as_json: bool) -> int:
    """Wait until all given runs have ended. Exit code 0 only if all completed; Ctrl-C stops the waiting, not the runs.

    A sweep stands for all its runs.

    \b
    clustertrain wait RUN && clustertrain checkpoint export RUN -o model
    """
    runs = find_runs(names or ("latest",))
    return wait_for(runs, runs[0].id if len(runs) == 1 else " ".join(names), as_json=as_json)


@click.command()
@click.argument("names", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_runs)
@json_option
def cancel(names: tuple[str, ...], as_json: bool) -> None:
    """End pending or running runs for good. Their checkpoints stay.

    A running run is "cancelling" until its ranks have exited; `wait` waits for that. A sweep stands for all its runs.
    """
    from clustertrain.submit.cancel_runs import cancel_runs

    result = cancel_runs(find_runs(names))
    for note in result.notes:
        click.echo(note, err=True)
    if as_json:
        from clustertrain.report.documents.runs import build_cancelled

        print_json("cancel", build_cancelled(result))
        return
    for current in result.statuses:
        if not current.is_final:
            click.echo(f"{current.run.id}: {result.states[current.run]}")


@click.command()
@required_run_argument
@click.option("--time", metavar="LIMIT", help="New time limit, as sbatch takes it.")
@click.option("--partition", metavar="NAME", help="New partition.")
@click.option("--qos", metavar="NAME", help="New quality of service.")
@click.option("--account", metavar="NAME", help="New account.")
@click.option("--exclude", metavar="NODES", help="Nodes to avoid.")
@click.option("--nodelist", metavar="NODES", help="Nodes to use.")
@json_option
def requeue(name: str, as_json: bool, **options: str | None) -> None:
    """Stop RUN at a checkpoint and start it again, or continue it if it has ended.

    \b
    clustertrain requeue RUN
    clustertrain requeue RUN --time 12:00:00 --exclude gpu-07
    """
    from clustertrain.submit.requeue_run import requeue_run

    run = find_run(name)
    job_id = requeue_run(run, {key: value for key, value in options.items() if value})
    if as_json:
        from clustertrain.report.documents.runs import RequeuedRun

        print_json("requeue", RequeuedRun(run=run.id, job_id=job_id, state="requeued"))
    else:
        click.echo(f"{run.id}: requeued (job {job_id})")

"""``clustertrain runs``: runs beside each other, and their scalars to trackers after the fact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import find_run, find_runs, json_option, named_run_argument, print_json
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir


@click.group()
def runs() -> None:
    """Compare runs, and hand a run's scalars on to its trackers. `clustertrain list` lists runs."""


@runs.command()
@click.argument("names", metavar="A B [C…]", nargs=-1, required=True)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Scalar to show; the first one decides.")
@click.option(
    "--by", type=click.Choice(["step", "tokens", "hours"]), default="step", show_default=True, help="The x-axis."
)
@click.option("--html", metavar="FILE", help="Write a page with the curves, which opens offline.")
@json_option
def compare(names: tuple[str, ...], metrics: tuple[str, ...], by: str, html: str | None, as_json: bool) -> None:
    """Two runs or more: what differs in their recipes, their curves, and which is best.

    Best is decided by the metric of the recipes' contract. A sweep stands for all its runs.
    """
    from clustertrain.report.html import check
    from clustertrain.report.runs import compare as comparison
    from clustertrain.run.run_dir import readable

    if html is not None:
        check(Path(html))
    chosen = find_runs(names)
    if len(chosen) < len(names):
        raise UsageError("runs compare: the same run is named twice")
    with readable():
        found = comparison.of_runs(chosen, metrics, by)  # type: ignore[arg-type]
    if html is not None:
        from clustertrain.report.html.runs_page import write

        click.echo(f"{html}: {write(found, Path(html)) / 1e3:,.0f} kB", err=True)
    if as_json:
        print_json(found)
    elif html is None:
        from clustertrain.report.runs import compare_text
        from clustertrain.report.terminal import make_console

        compare_text.show(found, make_console(rows=True))


@runs.command()
@named_run_argument
@click.option("--to", multiple=True, metavar="TRACKER", help="tensorboard, wandb or mlflow; default: the recipe's.")
@json_option
def track(name: str, to: tuple[str, ...], as_json: bool) -> int:
    """Hand on what trackers do not have yet of RUN, which has ended: from a login node, say, where nodes have no
    network."""
    from typing import get_args

    from clustertrain.config.tracking import Tracker
    from clustertrain.run.run_dir import readable
    from clustertrain.scheduler.run_status import look
    from clustertrain.tracking import run_facts

    for tracker in to:
        if tracker not in get_args(Tracker):
            raise UsageError(f"--to {tracker}: no tracker", fix=f"use one of {', '.join(get_args(Tracker))}")
    run = find_run(name)
    with readable():
        if look(run).state == "running":
            raise UsageError(
                f"{run.id} is running, and hands its rows on by itself", fix="wait for its end, or set [tracking] to"
            )
        wanted = to or run_facts.of_run(run, 0).spec.to
        if not wanted:
            raise UsageError(f"{run.id}: its recipe names no tracker", fix="name one, as --to tensorboard")
        done = {tracker: _hand_on(run, tracker) for tracker in wanted}
    if as_json:
        print_json(
            {"run": run.id, "trackers": {t: {"step": step, "error": error} for t, (step, error) in done.items()}}
        )
    else:
        for tracker, (step, error) in done.items():
            click.echo(f"{tracker}: {error or ('up to step ' + str(step) if step >= 0 else 'there are no rows')}")
    return 1 if any(error for _, error in done.values()) else 0


def _hand_on(run: RunDir, name: str) -> tuple[int, str | None]:
    """The last step that the tracker has, and what went wrong."""
    from clustertrain.errors import ClusterTrainError
    from clustertrain.tracking import endings, tracker
    from clustertrain.tracking import run_facts as facts

    said: list[str] = []
    try:
        made = tracker.make(name, run, facts.of_run(run, 0))
    except ClusterTrainError as e:
        return -1, str(e)
    handing = tracker.Handing(
        run, made, lambda _, why: said.append(why), ending=lambda: endings.of_run(run), again=False
    )
    handing.ask_to_stop()
    handing.thread.start()
    handing.thread.join()
    return handing.last, said[-1] if said else None

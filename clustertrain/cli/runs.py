"""``clustertrain runs``: compare runs, and upload their metrics to trackers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import find_run, find_runs, json_option, print_json, required_run_argument
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir


@click.group()
def runs() -> None:
    """Compare runs, or upload a run's metrics to trackers. `clustertrain list` lists runs."""


@runs.command()
@click.argument("names", metavar="A B [C…]", nargs=-1, required=True)
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Metric to show; the first one ranks the runs."
)
@click.option("--by", type=click.Choice(["step", "tokens", "hours"]), default="step", show_default=True, help="X-axis.")
@click.option("--html", metavar="FILE", help="Write a self-contained page with the curves.")
@json_option
def compare(names: tuple[str, ...], metrics: tuple[str, ...], by: str, html: str | None, as_json: bool) -> None:
    """Compare two or more runs: recipe differences, curves, and which is best.

    The metric of the recipes' contract decides which is best. A sweep stands for all its runs.
    """
    from clustertrain.report.html import check_path
    from clustertrain.report.runs import compare as comparison
    from clustertrain.run.run_dir import explain_permission_errors

    if html is not None:
        check_path(Path(html))
    run_dirs = find_runs(names)
    if len(run_dirs) < len(names):
        raise UsageError("runs compare: the same run is given twice")
    with explain_permission_errors():
        result = comparison.compare_runs(run_dirs, metrics, by)  # type: ignore[arg-type]
    if html is not None:
        from clustertrain.report.html.runs_page import write

        click.echo(f"{html}: {write(result, Path(html)) / 1e3:,.0f} kB", err=True)
    if as_json:
        print_json(result)
    elif html is None:
        from clustertrain.report.runs import compare_text
        from clustertrain.report.terminal import make_console

        compare_text.show(result, make_console(rows=True))


@runs.command()
@required_run_argument
@click.option("--to", multiple=True, metavar="TRACKER", help="tensorboard, wandb or mlflow (default: the recipe's).")
@json_option
def track(name: str, to: tuple[str, ...], as_json: bool) -> int:
    """Upload the metrics of an ended RUN that its trackers lack, for example from a login node with network access."""
    from typing import get_args

    from clustertrain.config.tracking import Tracker
    from clustertrain.run.run_dir import explain_permission_errors
    from clustertrain.scheduler.run_status import run_status
    from clustertrain.tracking import run_facts

    for tracker in to:
        if tracker not in get_args(Tracker):
            raise UsageError(f"--to {tracker} is not a tracker", fix=f"use one of {', '.join(get_args(Tracker))}")
    run = find_run(name)
    with explain_permission_errors():
        if run_status(run).state == "running":
            raise UsageError(
                f"{run.id} is running and uploads its own metrics", fix="wait for it to end, or set [tracking] to"
            )
        trackers = to or run_facts.load_run_metadata(run, 0).spec.trackers
        if not trackers:
            raise UsageError(f"{run.id}: its recipe names no tracker", fix="name one, for example --to tensorboard")
        outcomes = {tracker: _upload(run, tracker) for tracker in trackers}
    if as_json:
        print_json(
            {"run": run.id, "trackers": {t: {"step": step, "error": error} for t, (step, error) in outcomes.items()}}
        )
    else:
        for tracker, (step, error) in outcomes.items():
            click.echo(f"{tracker}: {error or ('up to step ' + str(step) if step >= 0 else 'no rows')}")
    return 1 if any(error for _, error in outcomes.values()) else 0


def _upload(run: RunDir, name: str) -> tuple[int, str | None]:
    """Return the last step that the tracker has, and the error if the upload failed."""
    from clustertrain.errors import ClusterTrainError
    from clustertrain.tracking import endings, registry, run_facts, tracker

    errors: list[str] = []
    try:
        client = registry.build_tracker(name, run, run_facts.load_run_metadata(run, 0))
    except ClusterTrainError as e:
        return -1, str(e)
    uploader = tracker.TrackerUploader(
        run, client, lambda _, reason: errors.append(reason), get_ending=lambda: endings.run_ending(run), retry=False
    )
    uploader.request_stop()
    uploader.thread.start()
    uploader.thread.join()
    return uploader.last_step, errors[-1] if errors else None

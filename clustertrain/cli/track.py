"""``clustertrain track``: upload the metrics of an ended run to trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import find_run, json_option, print_json, required_run_argument
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir


@click.command()
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
                f"{run.id} is running and uploads its own metrics", fix="wait for it to end, or set tracking.trackers"
            )
        trackers = to or run_facts.load_run_metadata(run, 0).spec.trackers
        if not trackers:
            raise UsageError(f"{run.id}: its recipe names no tracker", fix="name one, for example --to tensorboard")
        outcomes = {tracker: _upload(run, tracker) for tracker in trackers}
    if as_json:
        from clustertrain.report.documents.tools import TrackedRun, TrackerUpload

        uploads = {t: TrackerUpload(step=step, error=error) for t, (step, error) in outcomes.items()}
        print_json("track", TrackedRun(run=run.id, trackers=uploads))
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

"""``clustertrain submit``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import print_json
from clustertrain.cli.job_options import CONTEXT_SETTINGS, TargetCommand, build_request, job_options
from clustertrain.cli.progress import ProgressBar
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.plan.planner import Plan
    from clustertrain.run.run_dir import RunDir
    from clustertrain.submit.request import SubmitRequest


@click.command(cls=TargetCommand, context_settings=CONTEXT_SETTINGS)
@click.option("--dry-run", is_flag=True, help="Print job.sh and create nothing.")
@click.option("--wait", "wait", is_flag=True, help="Wait for the run to end; exit 0 only if it completed.")
@click.option("--follow", is_flag=True, help="Show progress until the run ends.")
@job_options
def submit(dry_run: bool, wait: bool, follow: bool, **options: Any) -> int:
    """Plan, render and submit a training run.

    RECIPE.toml trains a built-in model. SCRIPT.py is your own script; everything after it is passed to the script.
    With neither, the built-in trainer runs its default preset.

    Any other program: -m MODULE ARGS, or -- COMMAND ARGS, such as -- torchrun train.py or -- ./run.sh.

    \b
    clustertrain submit recipe.toml --nodes 4 --gpus 8 --time 1-00:00:00
    clustertrain submit --gpus 8 train.py --lr 3e-4
    clustertrain submit --gpus 8 -- torchrun train.py
    clustertrain submit recipe.toml --set optim.lr=1e-4 --dry-run
    """
    as_json = options["as_json"]
    if wait and follow:
        raise UsageError("--wait and --follow exclude each other", fix="use --follow, which waits too")
    request = build_request(options)
    if dry_run:
        return _dry_run(request, as_json)
    from clustertrain.submit import transaction

    with ProgressBar("packing the environment") as bar:
        submitted = transaction.submit(request, bar)
    for note in submitted.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        from clustertrain.report.documents.submissions import build_submitted

        print_json("submit", build_submitted(submitted))
    else:
        click.echo(f"run {submitted.run.id}  job {submitted.job_id}")
        if sys.stdout.isatty() and not (wait or follow):
            click.echo(_format_next_steps(submitted.run))
    if wait:
        from clustertrain.cli.jobs import wait_for

        return int(wait_for([submitted.run], submitted.run.id))
    if follow:
        from clustertrain.cli.follow import follow_run

        return int(follow_run(submitted.run))
    return 0


def _format_next_steps(run: RunDir) -> str:
    """Return where the run's files are, and the commands that people need next."""
    verbs = {"status": "progress, loss and time left", "logs -f": "its output", "top": "its GPUs, live"}
    commands = [f"  {f'clustertrain {verb} {run.id}':<{len(run.id) + 22}}  {text}" for verb, text in verbs.items()]
    return "\n".join([f"in {run.path}", *commands])


def _dry_run(request: SubmitRequest, as_json: bool) -> int:
    from clustertrain.submit.transaction import dry_run

    preview = dry_run(request)
    for line in (*format_training(preview.plan), *preview.plan.reasons, *preview.notes):
        click.echo(line, err=True)
    if as_json:
        from clustertrain.report.documents.submissions import SubmissionPreview

        print_json("submit-dry-run", SubmissionPreview(script=preview.script, plan=preview.plan))
    else:
        click.echo(preview.script, nl=False)
    return 0


def format_training(plan: Plan) -> list[str]:
    """Return one line per training setting that the plan reports."""
    return [f"{name}: {text}" for name, text in plan.training.items()]

"""``clustertrain rm``: delete ended runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain import clock
from clustertrain.cli.common import find_runs, json_option, print_json
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import ClusterTrainError, UsageError

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir
    from clustertrain.scheduler.run_status import RunStatus, Unreadable

GIB = 1 << 30
DELETED_SUFFIX = ".deleted"  # of a run folder that is being deleted; no command lists it


@click.command()
@click.argument("names", metavar="[RUN]…", nargs=-1, shell_complete=complete_runs)
@click.option("--older-than", metavar="TIME", help="All ended runs submitted longer ago than that, such as 30d.")
@click.option("--checkpoints", is_flag=True, help="Also runs with a checkpoint, which is deleted too.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted, with sizes.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def rm(
    names: tuple[str, ...], older_than: str | None, checkpoints: bool, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Delete the folders of ended runs.

    A run that may still start or run is never deleted, and one with a checkpoint only with --checkpoints. Checkpoints
    outside of the run folder and copies in object storage stay.
    """
    if bool(names) == bool(older_than):
        raise UsageError("rm: name runs, or give --older-than TIME", fix="clustertrain rm RUN, or --older-than 30d")
    runs = find_runs(names) if names else _list_older(older_than or "")
    deletable, kept = _select(runs, with_checkpoints=checkpoints)
    if names and kept:  # nothing is deleted if something that was named cannot be
        raise ClusterTrainError("\n".join(f"{run.id}: {reason}" for run, reason in kept), fix="leave it out")
    sizes = {run: _measure(run.path) for run in deletable}
    if not as_json:
        for run, size in sizes.items():
            click.echo(f"{run.id}  {size / GIB:.2f} GiB")
        for run, reason in kept:
            click.echo(f"{run.id}  stays: {reason}", err=True)
        click.echo(f"{len(sizes)} runs, {sum(sizes.values()) / GIB:.2f} GiB", err=True)
    if not dry_run and sizes:
        if not yes and not click.confirm("Delete them?", err=True):
            return 1
        for run in sizes:
            _delete(run)
    if as_json:
        rows = [{"run": run.id, "bytes": size, "deleted": not dry_run} for run, size in sizes.items()]
        print_json(rows + [{"run": run.id, "deleted": False, "reason": reason} for run, reason in kept])
    return 0


def _list_older(text: str) -> list[RunDir]:
    from clustertrain.cli.telemetry import parse_since
    from clustertrain.run import event_types, events
    from clustertrain.run.lookup import list_runs

    age_s, now, runs = parse_since(text, "--older-than"), clock.now(), []
    for run in list_runs():
        try:
            submitted = next(events.select(events.for_run(run), event_types.Submitted), None)
        except (ClusterTrainError, OSError):
            continue
        if submitted is not None and now - submitted.t > age_s:
            runs.append(run)
    return runs


def _select(runs: Sequence[RunDir], *, with_checkpoints: bool) -> tuple[list[RunDir], list[tuple[RunDir, str]]]:
    """Return the runs that may be deleted, and the others with the reason."""
    from clustertrain.scheduler.run_status import run_statuses

    deletable, kept = [], []
    for status in run_statuses(runs):
        reason = _find_reason(status, with_checkpoints=with_checkpoints)
        if reason is None:
            deletable.append(status.run)
        else:
            kept.append((status.run, reason))
    return deletable, kept


def _find_reason(status: RunStatus | Unreadable, *, with_checkpoints: bool) -> str | None:
    """Return why a run must not be deleted; None if it may be."""
    from clustertrain.scheduler.run_status import Unreadable

    if isinstance(status, Unreadable):
        return f"is unreadable, so it may still be running: {status.error}; delete {status.run.path} yourself"
    if status.scheduler_error:
        return f"the scheduler does not answer, so it may still be running: {status.scheduler_error}"
    if not status.is_final or (status.view is not None and status.view.is_alive):
        return f"is {status.state}; `clustertrain cancel {status.run.id}` ends it"
    if status.run.path.stat().st_uid != os.geteuid():
        return "belongs to another user"
    steps = status.run.committed_steps()
    if steps and not with_checkpoints and not status.run.checkpoints.is_symlink():
        return f"has a checkpoint of step {steps[-1]}; --checkpoints deletes it too"
    return None


def _measure(folder: Path) -> int:
    """Return the bytes on disk that deleting ``folder`` frees. A file with several links counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                info = Path(path, name).lstat()
            except OSError:
                continue
            if (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                total += info.st_blocks * 512
    return total


def _delete(run: RunDir) -> None:
    """Delete a run folder. It disappears from all lists at once, even if the deletion is interrupted."""
    doomed = run.path.with_name(f".{run.id}{DELETED_SUFFIX}")
    run.path.rename(doomed)
    shutil.rmtree(doomed)

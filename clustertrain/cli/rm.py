"""``clustertrain rm``: delete ended runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain import clock
from clustertrain.cli.common import find_runs, json_option, print_json
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import ClusterTrainError, UsageError
from clustertrain.plan.layout import pluralize

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir
    from clustertrain.scheduler.run_status import RunStatus, Unreadable

DELETED_SUFFIX = ".deleted"  # of a run folder that is being deleted; no command lists it
# A run that the scheduler does not know may run on another cluster with the same home, or be about to be submitted.
MIN_QUIET_S = 6 * 3600.0
_HINT = "; --checkpoints deletes it too"  # at the end of the reasons that the option removes


@click.command()
@click.argument("names", metavar="[RUN]…", nargs=-1, shell_complete=complete_runs)
@click.option("--older-than", metavar="TIME", help="Every ended run that was last active longer ago, for example 30d.")
@click.option(
    "--checkpoints", is_flag=True, help="Also delete runs that have checkpoints, and the checkpoints with them."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted, with sizes.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation.")
@json_option
def rm(
    names: tuple[str, ...], older_than: str | None, checkpoints: bool, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Delete the folders of ended runs.

    A run that may still start or run is never deleted, and one with a checkpoint only with --checkpoints. Checkpoints
    outside the run folder and copies in object storage are kept. The folder of a sweep is deleted with its last run.

    \b
    clustertrain rm --older-than 30d --dry-run
    clustertrain rm RUN --checkpoints
    """
    if bool(names) == bool(older_than):
        raise UsageError("rm: name runs, or give --older-than TIME", fix="clustertrain rm RUN, or --older-than 30d")
    if as_json and not (yes or dry_run):
        raise UsageError("rm --json does not ask for confirmation", fix="add --yes or --dry-run")
    runs = find_runs(names) if names else _list_inactive(older_than or "")
    deletable, kept = _select(runs, with_checkpoints=checkpoints)
    if names and kept:  # nothing is deleted if something that was named cannot be
        reasons = "\n".join(f"{run.id} is kept: {reason.removesuffix(_HINT)}" for run, reason in kept)
        fixes = ["add --checkpoints"] if all(reason.endswith(_HINT) for _, reason in kept) else []
        fixes += ["leave out the runs that are kept"] if deletable else []
        raise ClusterTrainError(f"nothing was deleted; {reasons}", fix=", or ".join(fixes) or None)
    from clustertrain.submit.leftovers import find_last_runs, remove_leftovers

    sizes, sweeps = {run: _measure(run.path) for run in deletable}, find_last_runs(deletable)
    if not as_json:
        _show(sizes, kept, {sweep: _measure(sweep) for sweep in sweeps})
    deleted: list[RunDir] = []
    if not dry_run and sizes:
        if not yes and not _confirm():
            return 1
        deleted, late = _delete_all(deletable, with_checkpoints=checkpoints)
        kept += late
        for problem in remove_leftovers(deleted, sweeps):
            click.echo(f"note: left over: {problem}", err=True)
        for run, reason in late if not as_json else ():
            click.echo(f"{run.id}: kept: {reason}", err=True)
    if as_json:
        from clustertrain.report.documents.runs import DeletedRun, DeletedRuns

        reasons_to_keep = dict(kept)
        rows = [
            DeletedRun(run=run.id, bytes=size, deleted=run in deleted, reason=reasons_to_keep.pop(run, None))
            for run, size in sizes.items()
        ]
        rows += [DeletedRun(run=run.id, bytes=None, deleted=False, reason=why) for run, why in reasons_to_keep.items()]
        print_json("rm", DeletedRuns(runs=tuple(rows)))
    return 0 if dry_run or len(deleted) == len(sizes) else 1


def _confirm() -> bool:
    try:
        return click.confirm("Delete them?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)  # the question has no line break
        raise UsageError(
            "rm asks for confirmation, but standard input is closed", fix="add --yes or --dry-run"
        ) from None


def _show(sizes: dict[RunDir, int], kept: Sequence[tuple[RunDir, str]], sweeps: dict[Path, int]) -> None:
    from clustertrain.report.checkpoint import format_size

    for run, size in sizes.items():
        elsewhere = f"  (checkpoints in {run.checkpoints.resolve()} are kept)" if run.checkpoints.is_symlink() else ""
        click.echo(f"{run.id}  {format_size(size)}{elsewhere}")
    for sweep, size in sweeps.items():
        click.echo(f"sweep {sweep.name}  {format_size(size)}  (it has no other runs)")
    for run, reason in kept:
        click.echo(f"{run.id}: kept: {reason}", err=True)
    total = sum(sizes.values()) + sum(sweeps.values())
    click.echo(f"{pluralize(len(sizes), 'run')}, {format_size(total)}", err=True)


def _list_inactive(text: str) -> list[RunDir]:
    from clustertrain.cli.telemetry import parse_since
    from clustertrain.run.lookup import list_runs

    if re.fullmatch(r"[0-9.]+", text):
        raise UsageError(f"--older-than {text} has no unit", fix=f"write {text}d for days")
    limit_t = clock.now() - parse_since(text, "--older-than")
    return [run for run in list_runs() if find_last_activity(run) < limit_t]


def find_last_activity(run: RunDir) -> float:
    """Return when a file of the run was last written, UTC epoch s: its record, events, rows and checkpoints."""
    return max((_modified(path) for path in _activity_files(run)), default=0.0)


def _activity_files(run: RunDir) -> Iterator[Path]:
    yield from (run.spec, run.job_log, run.cancel_marker)
    for folder, pattern in (
        (run.events, "*"),
        (run.metrics, "*"),
        (run.attempts_folder, "*/events/*"),
        (run.attempts_folder, "*/logs/*"),
        (run.checkpoints, "step-*/COMMITTED"),
    ):
        try:
            yield from folder.glob(pattern)
        except OSError:
            continue


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _select(runs: Sequence[RunDir], *, with_checkpoints: bool) -> tuple[list[RunDir], list[tuple[RunDir, str]]]:
    """Return the runs that may be deleted, and the others with the reason."""
    from clustertrain.scheduler.run_status import run_statuses

    reasons = {s.run: _find_reason(s, with_checkpoints=with_checkpoints) for s in run_statuses(runs)}
    return [run for run, reason in reasons.items() if not reason], [(run, r) for run, r in reasons.items() if r]


def _find_reason(status: RunStatus | Unreadable, *, with_checkpoints: bool) -> str:
    """Return why a run must not be deleted; empty if it may be."""
    from clustertrain.scheduler.run_status import Unreadable

    run = status.run
    if isinstance(status, Unreadable):
        return f"it is unreadable, so it may still be running: {status.error}; delete {run.path} yourself"
    if status.scheduler_error:
        return f"the scheduler does not answer, so it may still be running: {status.scheduler_error}"
    if not status.is_final:
        end = f"scancel {status.job_id}" if run.watched.exists() else f"clustertrain cancel {run.id}"
        return f"it is {status.shown_state}; `{end}` ends it"
    if status.view is not None and status.view.is_alive:
        return f"its job {status.job_id} has not ended yet; try again in a minute"
    if run.path.is_symlink():
        return f"its folder is a link; delete {run.path.resolve()} yourself"
    if run.path.stat().st_uid != os.geteuid():
        return "it belongs to another user"
    if not _has_recorded_end(run) and status.view is None and clock.now() - find_last_activity(run) < MIN_QUIET_S:
        return "its end is not recorded, and the scheduler here does not know its job: it may run on another cluster"
    return "" if with_checkpoints else _describe_checkpoint(status)


def _has_recorded_end(run: RunDir) -> bool:
    """Whether the run's files say that it has ended, whatever the scheduler knows."""
    from clustertrain.run import attempts

    history = attempts.load_attempts(run)
    return run.cancel_marker.exists() or bool(history and history[-1].ending and not history[-1].requeued)


def _describe_checkpoint(status: RunStatus) -> str:
    """Return that the run's folder has a checkpoint, of clustertrain or of a program; empty if not."""
    run = status.run
    steps = [] if run.checkpoints.is_symlink() else run.committed_steps()
    if steps:
        return f"it has a checkpoint of step {steps[-1]}{_HINT}"
    if any(a.saved_checkpoint and _is_inside(run, a.newest_checkpoint) for a in status.history):
        return f"its program has saved checkpoints in it{_HINT}"
    # A program may save in the run folder without anybody knowing the names.
    unknown = sorted(path.name for path in run.path.iterdir() if path.name not in _known_names(run))
    return f"its program has written {', '.join(unknown[:3])} in it{_HINT}" if unknown else ""


def _is_inside(run: RunDir, path: str | None) -> bool:
    return path is None or run.path.resolve() in Path(path).resolve().parents


def _known_names(run: RunDir) -> set[str]:
    """Return the names in a run folder that clustertrain writes."""
    from clustertrain.cli.open import PAGE

    properties = (getattr(run, name) for name, value in vars(type(run)).items() if isinstance(value, property))
    own = {path.name for path in properties if isinstance(path, Path)}
    archived = {path.name for path in run.path.glob("cancelled-until-*.json")}
    return own | archived | {PAGE, "continued", "preflight"}


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


def _delete_all(runs: Sequence[RunDir], *, with_checkpoints: bool) -> tuple[list[RunDir], list[tuple[RunDir, str]]]:
    """Delete the runs, and return those that are gone, and the others with the reason."""
    from clustertrain.scheduler.run_status import run_statuses
    from clustertrain.submit.continue_run import Continuation

    deleted, kept = [], []
    for run in runs:
        try:
            # While the user was asked, the run may have been continued. From the claim on, it can't be.
            continuation = Continuation(run)
            (status,) = run_statuses([run])
            if reason := _find_reason(status, with_checkpoints=with_checkpoints):
                kept.append((run, reason))
                continue
            continuation.claim()
            _delete(run)
            deleted.append(run)
        except ClusterTrainError as e:
            kept.append((run, e.message))
        except OSError as e:
            kept.append((run, f"{e.filename or run.path}: {e.strerror or e}; the rest is in {_doomed(run)}"))
    return deleted, kept


def _doomed(run: RunDir) -> Path:
    return run.path.with_name(f".{run.id}{DELETED_SUFFIX}")


def _delete(run: RunDir) -> None:
    """Delete a run folder. It disappears from all lists at once, even if the deletion is interrupted."""
    run.path.rename(_doomed(run))
    shutil.rmtree(_doomed(run))

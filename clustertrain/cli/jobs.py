"""Job control across attempts: list, status, wait, cancel, requeue."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from clustertrain import clock, fsio
from clustertrain.cli.common import (
    find_run,
    find_runs,
    json_option,
    print_json,
    required_run_argument,
    run_argument,
    watch,
)
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import ClusterTrainError, CommandFailed, UsageError
from clustertrain.run.run_dir import RunDir, explain_permission_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clustertrain.scheduler.backend import Backend
    from clustertrain.scheduler.run_status import RunStatus

MIN_POLL_S, MAX_POLL_S = 0.5, 15.0
WATCH_INTERVAL_S = 5.0  # each status asks the scheduler


def _log_event(run: RunDir, event: str, **fields: Any) -> None:
    from clustertrain.run.events import EventLog

    with fsio.group_umask(run.path):
        log = EventLog(run.events / f"{event}-{socket.gethostname()}-{os.getpid()}.jsonl")
    log.write(event, user=getpass.getuser(), **fields)
    log.close()


@click.command("list")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of runs."
)
@click.option("--recipe", metavar="HASH", help="Only runs whose recipe hash starts with HASH.")
@click.option("--same-as", metavar="RUN", help="Only runs of the same recipe as RUN.")
@json_option
def list_(limit: int, recipe: str | None, same_as: str | None, as_json: bool) -> None:
    """List your runs, newest first."""
    from clustertrain.report.progress import Progress, load_progress
    from clustertrain.scheduler.run_status import Unreadable, run_statuses

    statuses = run_statuses(_runs_of_recipe(recipe, same_as)[:limit])
    now = clock.now()
    progress = [
        Progress() if isinstance(x, Unreadable) else load_progress(x, now, with_failure=as_json) for x in statuses
    ]
    if as_json:
        from clustertrain.report.documents import runs

        pairs = list(zip(statuses, progress, strict=True))
        entries = tuple(runs.build_run_entry(x, p) for x, p in pairs if not isinstance(x, Unreadable))
        damaged = tuple(runs.build_unreadable(x) for x in statuses if isinstance(x, Unreadable))
        print_json("list", runs.RunList(runs=entries, unreadable=damaged))
        return
    from rich.console import Group
    from rich.text import Text

    from clustertrain.report.status import format_remarks, runs_table
    from clustertrain.report.terminal import emit, make_console

    readable = [(x, p) for x, p in zip(statuses, progress, strict=True) if not isinstance(x, Unreadable)]
    # Below the table, since a reason is a sentence.
    unreadable = [Text(f"{x.run.id}  unreadable: {x.error}") for x in statuses if isinstance(x, Unreadable)]
    console = make_console(rows=True)
    table = [runs_table(readable, console.width, now)] if readable or not unreadable else []
    emit(console, Group(*table, *unreadable, *format_remarks([x for x, _ in readable])))


def _runs_of_recipe(recipe: str | None, same_as: str | None) -> list[RunDir]:
    """Return all runs, or those of one recipe."""
    from clustertrain.run.lookup import list_runs
    from clustertrain.run.recipe_hash import load_recipe_hash

    if recipe is not None and same_as is not None:
        raise UsageError("--recipe and --same-as exclude each other", fix="use one of them")
    if recipe is None and same_as is None:
        return list_runs()
    with explain_permission_errors():
        hash_prefix = recipe if recipe is not None else load_recipe_hash(find_run(str(same_as)))
    if not hash_prefix or set(hash_prefix) - set("0123456789abcdef"):
        raise UsageError(
            f"--recipe {hash_prefix!r} is not a hash", fix="`list --json` and `status --json` show it as recipe_hash"
        )
    matching = []
    for run in list_runs():
        with contextlib.suppress(ClusterTrainError, OSError):  # an unreadable run has no recipe
            if load_recipe_hash(run).startswith(hash_prefix):
                matching.append(run)
    return matching


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
        from clustertrain.report.documents.runs import build_status

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
    from clustertrain.run import state
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
    from clustertrain.run import state
    from clustertrain.scheduler.run_status import Unreadable, run_statuses

    statuses = run_statuses(find_runs(names))
    for current in statuses:
        if isinstance(current, Unreadable):
            raise ClusterTrainError(f"{current.run.id}: {current.error}", fix=current.fix)
    readable_statuses = [current for current in statuses if not isinstance(current, Unreadable)]
    already_ended = [
        f"{current.run.id} has already ended: {current.state}" for current in readable_statuses if current.is_final
    ]
    if len(already_ended) == len(readable_statuses):
        raise ClusterTrainError("\n".join(already_ended))
    active = [current for current in readable_statuses if not current.is_final]
    already_cancelling = {current.run for current in active if current.is_cancelling}
    # The markers come first: a process that is deciding about a run now must see it before the job is gone.
    for current in active:
        fsio.write_json(current.run.cancel_marker, {"t": clock.now(), "user": getpass.getuser()})
        _log_event(current.run, "cancelled")
    cancelling = _cancel_jobs(active)
    for line in already_ended:
        click.echo(line, err=True)
    for current in active:
        if current.run in already_cancelling and current.run in cancelling:
            wait_hint = f"`clustertrain wait {current.run.id}` waits for its end"
            click.echo(f"note: {current.run.id} was being cancelled already; {wait_hint}", err=True)
    states = {
        s.run: s.state if s.is_final else state.CANCELLING if s.run in cancelling else state.CANCELLED
        for s in readable_statuses
    }
    if as_json:
        from clustertrain.report.documents.runs import CancelledRun, CancelledRuns

        rows = tuple(CancelledRun(run=s.run.id, job_id=s.job_id, state=states[s.run]) for s in readable_statuses)
        print_json("cancel", CancelledRuns(runs=rows))
        return
    for current in active:
        click.echo(f"{current.run.id}: {states[current.run]}")


def _cancel_jobs(statuses: Sequence[RunStatus]) -> set[RunDir]:
    """Ask the schedulers to end the jobs of these runs; return the runs whose jobs may still be alive.

    A scheduler that did not answer a moment ago is not asked again.
    """
    from clustertrain.run.attempts import list_job_ids
    from clustertrain.scheduler.registry import get_backend

    still_running: set[RunDir] = set()
    # Slurm answers for all jobs or for none; only its own machine knows about a local job.
    slurm_runs = [current for current in statuses if current.backend == "slurm"]
    groups = [*([slurm_runs] if slurm_runs else []), *([current] for current in statuses if current.backend != "slurm")]
    for group in groups:
        ids_by_run = {current.run: list_job_ids(current.run) for current in group}
        silence = next((current.scheduler_error for current in group if current.scheduler_error), None)
        backend = get_backend(group[0].backend)
        try:
            if silence is not None:
                raise CommandFailed(silence)
            alive = _alive_jobs(backend, [job_id for run_job_ids in ids_by_run.values() for job_id in run_job_ids])
            if alive:
                backend.cancel(*alive)
                alive = _alive_jobs(backend, alive)
            still_running.update(run for run, run_job_ids in ids_by_run.items() if set(run_job_ids) & set(alive))
        except CommandFailed as e:
            still_running.update(ids_by_run)
            note = (
                "the run is marked as cancelled: a running attempt ends within a minute, a pending job as soon as it "
                "starts"
            )
            click.echo(f"note: the scheduler did not answer ({e.message}); {note}", err=True)
            run_ids = " ".join(run.id for run in ids_by_run)
            click.echo(f"      to remove a pending job from the queue, repeat: clustertrain cancel {run_ids}", err=True)
    return still_running


def _alive_jobs(backend: Backend, job_ids: Sequence[str]) -> list[str]:
    return [job_id for job_id, view in backend.query_jobs(job_ids).items() if view.is_alive]


def _check_budget(run: RunDir) -> None:
    """Raise ClusterTrainError if the run's budget is spent, so that it would stop at once."""
    from clustertrain.run.run_spec import load_spec
    from clustertrain.run.usage import budget

    contract = load_spec(run).recipe.contract
    if not contract.has_budget or contract.on_budget_spent != "stop":
        return
    reason = budget.format_spent(contract, budget.compute_run_usage(run, contract, clock.now()))
    if reason:
        raise ClusterTrainError(f"{run.id}: {reason}", fix=f"raise the limits under [recipe.contract] in {run.spec}")


def _check_requeue_limit(run: RunDir) -> None:
    """Raise ClusterTrainError if a running run would stop for good instead of being requeued."""
    from clustertrain.run import attempts, endings
    from clustertrain.run.run_spec import load_spec
    from clustertrain.scheduler.requeue_policy import find_exhausted_budget

    reason = find_exhausted_budget(
        endings.PREEMPTED, attempts.load_budgeted_attempts(run), load_spec(run).job.max_requeues
    )
    if reason:
        raise ClusterTrainError(
            f"{run.id} would not start again: {reason}",
            fix=f"clustertrain cancel {run.id}; clustertrain wait {run.id}; clustertrain requeue {run.id}  (the count "
            "starts over)",
        )


def _check_wrapped_requeue(run: RunDir, job_id: str, overrides: Mapping[str, str]) -> None:
    """Refuse what a run of `clustertrain wrap` cannot do: only `scontrol requeue` starts the user's script again."""
    from clustertrain.scheduler.run_status import backend_for_run

    if overrides:
        raise UsageError(
            f"--{next(iter(overrides))}: {run.id} runs in your own batch script, whose job keeps its options",
            fix="leave it out, or change the script and submit it again with sbatch",
        )
    problem = backend_for_run(run).find_requeue_problem(job_id)
    if problem:
        raise ClusterTrainError(
            f"{run.id} cannot be requeued: {problem}", fix=f"allow it: scontrol update JobId={job_id} Requeue=1"
        )


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
    from clustertrain.run.attempts import load_submit_options
    from clustertrain.run.run_spec import load_spec
    from clustertrain.scheduler.run_status import backend_for_run, run_status
    from clustertrain.submit import continue_run

    run = find_run(name)
    continuation = continue_run.Continuation(run)
    current = run_status(run)
    overrides = {k: v for k, v in options.items() if v}
    if overrides.keys() - {"time"} and current.backend == "local":
        raise UsageError(
            f"--{next(iter(overrides.keys() - {'time'}))} has no effect on the local backend", fix="leave it out"
        )
    if overrides.get("time"):
        from clustertrain.config.parsing.time_limits import parse_time_limit_s

        parse_time_limit_s(overrides["time"])
    if current.state == "completed":
        raise ClusterTrainError(f"{run.id} has completed; there is nothing to continue")
    _check_budget(run)
    job_id = current.job_id
    is_wrapped = load_spec(run).wrapped
    if is_wrapped:
        _check_wrapped_requeue(run, str(job_id), overrides)
    if run.cancel_marker.exists() and not current.is_final:
        raise ClusterTrainError(
            f"{run.id} is still being cancelled: job {job_id} has not ended", fix=continue_run.suggest_after_cancel(run)
        )
    if current.state == "running" and current.history[-1].job_id == job_id:
        _check_requeue_limit(run)
        continue_run.request_requeue(run, run.attempt(current.history[-1].n), overrides)
    elif not current.is_final:
        raise ClusterTrainError(f"{run.id} is already pending, as job {current.job_id}")
    else:
        with fsio.group_umask(run.path):
            continuation.claim()
            _log_event(run, "continued")
            job_id = (
                continuation.requeue_job(backend_for_run(run), str(job_id))
                if is_wrapped
                else continuation.submit(backend_for_run(run), {**load_submit_options(run), **overrides})
            )
            _log_event(run, "continued", job_id=job_id, options=overrides)
            continuation.record_job(job_id)
    if as_json:
        from clustertrain.report.documents.runs import RequeuedRun

        print_json("requeue", RequeuedRun(run=run.id, job_id=job_id, state="requeued"))
    else:
        click.echo(f"{run.id}: requeued (job {job_id})")

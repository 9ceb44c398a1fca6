"""Job control across attempts: list, status, wait, cancel, requeue."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from clustertrain import clock, fsio
from clustertrain.cli.common import (
    find_run,
    find_runs,
    json_option,
    named_run_argument,
    print_json,
    run_argument,
)
from clustertrain.errors import ClusterTrainError, CommandFailed, UsageError
from clustertrain.run.run_dir import RunDir, readable

if TYPE_CHECKING:
    from clustertrain.scheduler.backend import Backend
    from clustertrain.scheduler.run_status import Look

POLL_FIRST_S, POLL_MOST_S = 0.5, 15.0


def _say(run: RunDir, event: str, **fields: Any) -> None:
    from clustertrain.run.events import EventLog

    with fsio.as_open_as(run.path):
        log = EventLog(run.events / f"{event}-{socket.gethostname()}-{os.getpid()}.jsonl")
    log.write(event, by=getpass.getuser(), **fields)
    log.close()


@click.command("list")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many.")
@click.option("--recipe", metavar="HASH", help="Only runs of the recipe with this hash, or the beginning of one.")
@click.option("--same-as", metavar="RUN", help="Only runs of the same recipe as RUN's.")
@json_option
def list_(limit: int, recipe: str | None, same_as: str | None, as_json: bool) -> None:
    """My runs, newest first."""
    from clustertrain.scheduler.run_status import Unreadable, look_all

    found = look_all(_of_recipe(recipe, same_as)[:limit])
    if as_json:
        print_json([_unreadable_json(x) if isinstance(x, Unreadable) else status_json(x) for x in found])
        return
    from rich.console import Group
    from rich.text import Text

    from clustertrain.report.status import remarks, runs_table
    from clustertrain.report.terminal import emit, make_console

    looks = [x for x in found if not isinstance(x, Unreadable)]
    # Below the table: a reason is a sentence.
    unreadable = [Text(f"{x.run.id}  unreadable: {x.error}") for x in found if isinstance(x, Unreadable)]
    console = make_console(rows=True)
    table = [runs_table(looks, console.width)] if looks or not unreadable else []
    emit(console, Group(*table, *unreadable, *remarks(looks)))


def _of_recipe(recipe: str | None, same_as: str | None) -> list[RunDir]:
    """All runs, or those of one recipe."""
    from clustertrain.run.lookup import all_runs
    from clustertrain.run.recipe_hash import recipe_hash

    if recipe is not None and same_as is not None:
        raise UsageError("--recipe and --same-as: choose one")
    if recipe is None and same_as is None:
        return all_runs()
    with readable():
        wanted = recipe if recipe is not None else recipe_hash(find_run(str(same_as)))
    if not wanted or set(wanted) - set("0123456789abcdef"):
        raise UsageError(f"--recipe {wanted!r}: no hash", fix="`list` and `status --json` show it, as recipe_hash")
    found = []
    for run in all_runs():
        with contextlib.suppress(ClusterTrainError, OSError):  # one that does not read is of no recipe
            if recipe_hash(run).startswith(wanted):
                found.append(run)
    return found


def _unreadable_json(row: Any) -> dict[str, Any]:
    return {"run": row.run.id, "state": None, "error": row.error}


@click.command()
@run_argument
@json_option
def status(name: str, as_json: bool) -> None:
    """The attempts of RUN, how they ended, the step, what the plan predicted and the run measured, and where the time
    went."""
    import msgspec

    from clustertrain.report import plan_vs_measured
    from clustertrain.scheduler.run_status import look

    with readable():
        seen = look(find_run(name))
        compared = plan_vs_measured.of_run(seen.run)
    if as_json:
        print_json({**status_json(seen), "prediction": msgspec.to_builtins(compared)})
        return
    from clustertrain.report.status import render
    from clustertrain.report.terminal import emit, glyphs, make_console

    out = make_console(rows=True)
    emit(out, render(seen, compared, out.width, glyphs(out)))


def status_json(seen: Any) -> dict[str, Any]:
    """The keys that scripts lean on (docs: design of the public interface), and a few more."""
    import msgspec

    from clustertrain.run.recipe_hash import recipe_hash

    view = seen.view
    return {
        "run": seen.run.id,
        "job_id": seen.job_id,
        "name": seen.name,
        "backend": seen.backend,
        "state": seen.state,
        "step": seen.step,
        "total_steps": seen.total_steps,
        "pending_reason": view.reason or None if view and view.state == "PENDING" else None,
        "start_estimate": view.start_time if view and view.state == "PENDING" else None,
        "scheduler_silent": seen.silence,
        "cancelling": seen.cancelling,
        "undecided": seen.undecided,
        "to_continue": seen.to_continue,
        "attempts": [
            {
                "n": a.n,
                "job_id": a.job_id,
                "restart": a.restart,
                "state": seen.state_of(a),
                "reason": a.reason,
                "nodes": list(a.nodes),
                "start": a.start,
                "end": a.end,
                "first_step": a.first_step,
                "last_step": a.last_step,
                "committed_step": a.committed_step,
                "roll_backs": a.roll_backs,
                "requeued": a.requeued,
                "stopped": a.stopped,
            }
            for a in seen.history
        ],
        "skipped_steps": seen.skipped_steps,
        "roll_backs": seen.roll_backs,
        "goodput": msgspec.to_builtins(seen.goodput),
        "contract": msgspec.to_builtins(seen.contract),
        "recipe_hash": seen.recipe_hash or recipe_hash(seen.run),
        "run_dir": str(seen.run.path),
    }


def wait_for(runs: Sequence[RunDir], name: str) -> int:
    """Block until all runs have ended; returns 0 only if all completed. An interrupt ends the waiting, not the runs.
    ``name`` is what they are called together."""
    from clustertrain.scheduler.run_status import Unreadable, look_all

    poll, left, completed = POLL_FIRST_S, list(runs), True
    try:
        while True:
            for seen in look_all(left):
                if isinstance(seen, Unreadable):
                    raise ClusterTrainError(f"{seen.run.id}: {seen.error}", fix=seen.fix)
                if seen.final:
                    click.echo(f"{seen.run.id}: {seen.state}", err=True)
                    completed &= seen.state == "completed"
                    left.remove(seen.run)
            if not left:
                return 0 if completed else 1
            clock.sleep(poll)
            poll = min(poll * 1.5, POLL_MOST_S)
    except KeyboardInterrupt:
        click.echo(f"{name} goes on; `clustertrain cancel {name}` would end it", err=True)
        return 130


@click.command()
@click.argument("names", metavar="[RUN]…", nargs=-1)
def wait(names: tuple[str, ...]) -> int:
    """Wait until RUN has ended, or several have, or a sweep's. Exit code 0 only if all completed; Ctrl-C stops the
    waiting, never a run."""
    runs = find_runs(names or ("latest",))
    return wait_for(runs, runs[0].id if len(runs) == 1 else " ".join(names))


@click.command()
@click.argument("names", metavar="RUN…", nargs=-1, required=True)
@json_option
def cancel(names: tuple[str, ...], as_json: bool) -> None:
    """End RUN for good, pending or running, or several, or a sweep's. Their checkpoints stay. A running one is
    "cancelling" until its ranks have left: `wait` waits for that."""
    from clustertrain.scheduler.run_status import Unreadable, look_all

    found = look_all(find_runs(names))
    for seen in found:
        if isinstance(seen, Unreadable):
            raise ClusterTrainError(f"{seen.run.id}: {seen.error}", fix=seen.fix)
    looks = [seen for seen in found if not isinstance(seen, Unreadable)]
    ended = [f"{seen.run.id} has ended already: {seen.state}" for seen in looks if seen.final]
    if len(ended) == len(looks):
        raise ClusterTrainError("\n".join(ended))
    left = [seen for seen in looks if not seen.final]
    # The markers come first: whatever is deciding about a run at this moment must see it before the job is gone.
    for seen in left:
        fsio.write_json(seen.run.cancelled, {"t": clock.now(), "by": getpass.getuser()})
        _say(seen.run, "cancelled")
    ending = _end_jobs(left)
    for line in ended:
        click.echo(line, err=True)
    states = {s.run: s.state if s.final else "cancelling" if s.run in ending else "cancelled" for s in looks}
    if as_json:
        rows = [{"run": s.run.id, "job_id": s.job_id, "state": states[s.run]} for s in looks]
        print_json(rows[0] if len(rows) == 1 else rows)
        return
    for seen in left:
        click.echo(f"{seen.run.id}: {states[seen.run]}")


def _end_jobs(looks: Sequence[Look]) -> set[RunDir]:
    """Have the schedulers end the jobs of these runs; returns the runs whose jobs are not known to be over. Of one that
    gave no answer a moment ago nothing more is asked."""
    from clustertrain.run.attempts import job_ids
    from clustertrain.scheduler.registry import of_run

    ending: set[RunDir] = set()
    # Slurm answers for all jobs or for none; of a local job only its own machine knows.
    of_slurm = [seen for seen in looks if seen.backend == "slurm"]
    groups = [*([of_slurm] if of_slurm else []), *([seen] for seen in looks if seen.backend != "slurm")]
    for group in groups:
        ids = {seen.run: job_ids(seen.run) for seen in group}
        silence = next((seen.silence for seen in group if seen.silence), None)
        backend = of_run(group[0].backend)
        try:
            if silence is not None:
                raise CommandFailed(silence)
            alive = _alive(backend, [job_id for of_one in ids.values() for job_id in of_one])
            if alive:
                backend.cancel(*alive)
                alive = _alive(backend, alive)
            ending.update(run for run, of_one in ids.items() if set(of_one) & set(alive))
        except CommandFailed as e:
            ending.update(ids)
            note = (
                "the run is marked as cancelled: a running attempt ends within a minute, a waiting job as soon as it "
                "starts"
            )
            click.echo(f"note: the scheduler gave no answer ({e.message}); {note}", err=True)
            again = " ".join(run.id for run in ids)
            click.echo(f"      to take a waiting job out of the queue, repeat: clustertrain cancel {again}", err=True)
    return ending


def _alive(backend: Backend, job_ids: Sequence[str]) -> list[str]:
    return [job_id for job_id, view in backend.views(job_ids).items() if view.alive]


def _refuse_spent(run: RunDir) -> None:
    """Raises ClusterTrainError for a run that would stop again at once."""
    from clustertrain.run import budget
    from clustertrain.run.run_spec import load_spec

    contract = load_spec(run).recipe.contract
    if not contract.has_budget or contract.when_spent != "stop":
        return
    why = budget.spent(contract, budget.of_run(run, contract, clock.now()))
    if why:
        raise ClusterTrainError(f"{run.id}: {why}", fix=f"raise the limits under [recipe.contract] in {run.spec}")


def _refuse_used_up(run: RunDir) -> None:
    """Raises ClusterTrainError for a running run that would stop for good instead of starting again."""
    from clustertrain.run import attempts, endings
    from clustertrain.run.run_spec import load_spec
    from clustertrain.scheduler.requeue_policy import budget_spent

    why = budget_spent(endings.PREEMPTED, attempts.charged(run), load_spec(run).job.max_requeues)
    if why:
        raise ClusterTrainError(
            f"{run.id} would not start again: {why}",
            fix=f"clustertrain cancel {run.id}; clustertrain wait {run.id}; clustertrain requeue {run.id}  (the count "
            "starts over)",
        )


@click.command()
@named_run_argument
@click.option("--time", help="Another time limit, as sbatch takes it.")
@click.option("--partition", help="Another partition.")
@click.option("--qos", help="Another quality of service.")
@click.option("--account", help="Another account.")
@click.option("--exclude", help="Nodes to leave out.")
@click.option("--nodelist", help="Nodes to use.")
@json_option
def requeue(name: str, as_json: bool, **options: str | None) -> None:
    """Stop RUN at a checkpoint and start it again now; or continue it, if it has ended."""
    from clustertrain.run.attempts import carried_options
    from clustertrain.scheduler.run_status import backend_of, look
    from clustertrain.submit import continue_run

    run = find_run(name)
    continuation = continue_run.Continuation(run)
    seen = look(run)
    given = {k: v for k, v in options.items() if v}
    if given.keys() - {"time"} and seen.backend == "local":
        raise UsageError(f"--{next(iter(given.keys() - {'time'}))} means nothing to the local backend")
    if given.get("time"):
        from clustertrain.config.time_limits import seconds_of

        seconds_of(given["time"])
    if seen.state == "completed":
        raise ClusterTrainError(f"{run.id} is complete; there is nothing to continue")
    _refuse_spent(run)
    job_id = seen.job_id
    if run.cancelled.exists() and not seen.final:
        raise ClusterTrainError(
            f"{run.id} is still being cancelled, job {job_id} has not ended", fix=continue_run.after_cancel(run)
        )
    if seen.state == "running" and seen.history[-1].job_id == job_id:
        _refuse_used_up(run)
        continue_run.ask(run, run.attempt(seen.history[-1].n), given)
    elif not seen.final:
        raise ClusterTrainError(f"{run.id} is waiting already, as job {seen.job_id}")
    else:
        with fsio.as_open_as(run.path):
            continuation.claim()
            _say(run, "continued")
            job_id = continuation.submit(backend_of(run), {**carried_options(run), **given})
            _say(run, "continued", job_id=job_id, options=given)
            continuation.submitted(job_id)
    if as_json:
        print_json({"run": run.id, "job_id": job_id, "state": "requeued"})
    else:
        click.echo(f"{run.id}: requeued (job {job_id})")

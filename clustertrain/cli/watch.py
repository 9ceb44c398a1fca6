"""``clustertrain watch``: telemetry of a running Slurm job that was started by anything."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain.errors import ClusterTrainError, UsageError

if TYPE_CHECKING:
    from clustertrain.scheduler.slurm_job import SlurmJob
    from clustertrain.watch.session import WatchSession

ONCE_S = 4.0  # of samples with --once
_WAIT_S = 0.5


@click.command()
@click.argument("job_id", metavar="JOBID")
@click.option("--once", is_flag=True, help="Sample for a few seconds, print the report and leave.")
@click.option("--html", metavar="FILE", help="Also write the report as a self-contained page with curves.")
@click.option("--json", "as_json", is_flag=True, help="As --once, but print the report as one JSON document.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=60.0),
    metavar="S",
    default=3.0,
    show_default=True,
    help="Seconds between samples.",
)
def watch(job_id: str, once: bool, html: str | None, as_json: bool, interval: float) -> int:
    """Watch the GPUs, hosts and ranks of a running Slurm job of yours that was started without clustertrain.

    It starts a sampler on the job's nodes, as a step that takes none of the job's resources (`srun --overlap`), and
    does not change the job. It prints a first report of all nodes, then shows the screen of `clustertrain top`, or on a
    pipe waits, and prints the report again at the end of the job. q or Ctrl-C leaves: the samplers end, and the job
    continues.

    The recording is a run: `list`, `top`, `telemetry`, `open`, `compare` and `rm` take the job id or the run id.

    \b
    clustertrain watch 123
    clustertrain watch 123_4 --once --html gpus.html
    """
    from clustertrain.watch import target

    target.check_job_id(job_id)
    page = None if html is None else _check_page(html)
    target.check_slurm()
    job = target.find_job(job_id)
    target.check_not_a_run(job.job_id)
    if not job.is_running:
        if once or as_json:
            raise ClusterTrainError(
                f"job {job.job_id} is {job.state.lower()}: {job.reason or 'no reason given'}",
                fix="without --once, `watch` waits for its start",
            )
        with _leave_on_signals():
            job = target.wait_for_start(job, _report_wait)
    return _watch(job, once=once or as_json, as_json=as_json, page=page, interval=interval)


def _check_page(html: str) -> Path:
    from clustertrain.report.html import check_path

    if html == "-":
        raise UsageError("--html -: the page cannot go to standard output", fix="name a file: --html report.html")
    check_path(Path(html))
    return Path(html)


def _report_wait(job: SlurmJob) -> None:
    reason = f" ({job.reason})" if job.reason else ""
    click.echo(f"job {job.job_id} is {job.state.lower()}{reason}: waiting for its start; Ctrl-C leaves", err=True)


def _watch(job: SlurmJob, *, once: bool, as_json: bool, page: Path | None, interval: float) -> int:
    from clustertrain.watch.session import WatchOptions, WatchSession

    session = WatchSession(job, WatchOptions(interval, lambda line: click.echo(f"note: {line}", err=True)))
    code = 0
    with _leave_on_signals():
        session.open()
        try:
            _import_reports()
            session.wait_for_samples()
            code = _show(session, once=once, as_json=as_json, interval=interval)
        except KeyboardInterrupt:
            code = 130
        finally:
            with _ignore_signals():
                session.close()
    if code == 0:
        _print_final(session, as_json=as_json)
    if page is not None:
        from clustertrain.cli.telemetry import write_report_page

        write_report_page(session.run, page)
        click.echo(page, err=True)
    ended = session.ended.is_set()
    click.echo(
        f"{'recorded' if ended else 'left job ' + job.job_id + '; recorded'} as run {session.run.id}: "
        f"clustertrain telemetry {session.run.id}",
        err=True,
    )
    return code


def _show(session: WatchSession, *, once: bool, as_json: bool, interval: float) -> int:
    """Show the job until it ends or the user leaves; return 0 if the final report is due."""
    from clustertrain.cli.telemetry import print_report

    if once:
        session.ended.wait(max(ONCE_S, 2 * interval))
        return 0
    print_report(session.run, as_json=as_json)
    sys.stdout.flush()
    if sys.stdout.isatty() and sys.stdin.isatty():
        from clustertrain.cli.top import show_until

        show_until(session.run, max(1.0, interval), session.ended.is_set)
        return 0
    while not session.ended.wait(_WAIT_S):
        pass
    return 0


def _print_final(session: WatchSession, *, as_json: bool) -> None:
    from clustertrain.cli.telemetry import print_report

    print_report(session.run, as_json=as_json)


def _import_reports() -> None:
    """Import what the report needs while the samplers take their first samples."""
    import clustertrain.cli.telemetry
    import clustertrain.report.telemetry
    import clustertrain.telemetry.analysis.summarize  # noqa: F401


@contextlib.contextmanager
def _leave_on_signals() -> Iterator[None]:
    """Leave in order after SIGTERM, and if the terminal is closed."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {s: signal.signal(s, leave) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ignore_signals() -> Iterator[None]:
    """Finish leaving, although the user presses Ctrl-C again: the samplers are asked once."""
    previous = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""``clustertrain telemetry``: report a run's GPUs and hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import find_run, json_option, print_json, run_argument
from clustertrain.errors import ClusterTrainError, UsageError

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir
    from clustertrain.run.usage.contract_status import ContractStatus
    from clustertrain.run.usage.goodput import Goodput
    from clustertrain.telemetry.analysis.summarize import SummaryRequest
    from clustertrain.telemetry.report_schema import Summary


def parse_since(text: str, option: str = "--since") -> float:
    """Parse a duration as in a recipe, or a number of seconds.

    Raises:
        UsageError: it is neither, or not positive.
    """
    from clustertrain.config.parsing.durations import parse_duration_s

    since_s = float(text) if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text) else parse_duration_s(text)
    if since_s is None:
        raise UsageError(f"{option} {text} is not a duration", fix="write 90s, 10min, 1h or 1h30m")
    if since_s <= 0:
        raise UsageError(f"{option} {text} must be positive", fix="write 90s, 10min, 1h or 1h30m")
    return since_s


@click.command()
@run_argument
@json_option
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Only this attempt.  [default: all]")
@click.option("--gpu", metavar="GPU", help="Only GPUs that match a UUID prefix, an index, or NODE:INDEX.")
@click.option("--since", metavar="TIME", help="Only the last part of the recording, for example 10min or 1h.")
@click.option("--brief", is_flag=True, help="Only the summary and the insights, without tables.")
@click.option("--all", "every", is_flag=True, help="Show all GPUs, hosts, events and insights.")
@click.option("--html", metavar="FILE", help="Write the report as a self-contained page with curves.")
@click.option("--csv", metavar="FILE", help="Write all samples as CSV; - is standard output.")
@click.option("--parquet", metavar="FILE", help="Write all samples as a Parquet file.")
def telemetry(
    name: str,
    as_json: bool,
    attempt: int | None,
    gpu: str | None,
    since: str | None,
    brief: bool,
    every: bool,
    html: str | None,
    csv: str | None,
    parquet: str | None,
) -> None:
    """Report a run's GPUs and hosts over all nodes and attempts, during the run and afterwards.

    RUN is a run id or a unique prefix of one, a job id, or `latest` (the default). --html, --csv and --parquet write a
    file instead of showing the report; --json prints it in addition.

    \b
    clustertrain telemetry RUN --brief          the verdict and the insights
    clustertrain telemetry RUN --gpu gpu-07:3 --since 1h
    clustertrain telemetry RUN --html report.html
    """
    since_s = None if since is None else parse_since(since)
    if html == "-":
        raise UsageError("--html -: the page cannot go to standard output", fix="name a file: --html report.html")
    if as_json and csv == "-":
        raise UsageError("--json and --csv - both write to standard output", fix="name a file for the CSV")
    # Not at the top: numpy and rich cost more than the rest of the command line together.
    from clustertrain.run.run_dir import explain_permission_errors
    from clustertrain.telemetry.analysis.summarize import SummaryRequest, summarize

    run = find_run(name)
    request = SummaryRequest(attempt, gpu, since_s, *_scheduler_state(run))
    _check_html_path(html)
    with explain_permission_errors():
        if csv is not None or parquet is not None:
            _write_tables(run, request, csv, parquet)
        if (csv is not None or parquet is not None) and html is None and not as_json:
            return
        summary = summarize(run, request)
        if html is not None:
            size = _write_page(run, summary, html)
            click.echo(f"{html}: {size / 1e3:,.0f} kB", err=True)
    if as_json:
        print_json("telemetry", summary)
    if as_json or html is not None:
        return
    from clustertrain.report.telemetry import show
    from clustertrain.report.terminal import make_console

    show(summary, make_console(), every, brief=brief)


def read_summary(run: RunDir, *, attempt: int | None = None, since: str | None = None) -> Summary:
    """Return the report of a run, or of one attempt, or of its last part, such as ``10min``.

    Raises:
        UsageError: ``since`` is no duration, or nothing matches.
    """
    from clustertrain.telemetry.analysis.summarize import SummaryRequest, summarize

    since_s = None if since is None else parse_since(since, "since")
    return summarize(run, SummaryRequest(attempt, None, since_s, *_scheduler_state(run)))


def write_report_page(run: RunDir, page: Path) -> None:
    """Write the HTML page of the whole run. Raise ConfigError if it cannot be written."""
    _check_html_path(str(page))
    _write_page(run, read_summary(run), str(page))


def print_report(run: RunDir, *, as_json: bool = False) -> None:
    """Print the report of the whole run."""
    from clustertrain.telemetry.analysis.summarize import SummaryRequest, summarize

    summary = summarize(run, SummaryRequest(None, None, None, *_scheduler_state(run)))
    if as_json:
        print_json("telemetry", summary)
        return
    from clustertrain.report.telemetry import show
    from clustertrain.report.terminal import make_console

    show(summary, make_console())


def _scheduler_state(run: RunDir) -> tuple[str | None, Goodput | None, ContractStatus | None]:
    """Return the state, goodput and contract status that need the scheduler's answer."""
    from clustertrain.scheduler.run_status import run_status

    try:
        status = run_status(run)
    except (ClusterTrainError, OSError):  # another user's run, or a damaged one: report the rest
        return None, None, None
    return status.state, status.goodput, status.contract


def _check_html_path(html: str | None) -> None:
    """Raise ConfigError if the page cannot be written; checked first, since reading may take minutes."""
    if html is not None:
        from clustertrain.report.html import check_path

        check_path(Path(html))


def _write_page(run: RunDir, summary: Summary, html: str) -> int:
    """Write the HTML page; return its size in bytes. Raise ConfigError if it cannot be written."""
    from clustertrain.report.html import write
    from clustertrain.report.html.context import load_context
    from clustertrain.telemetry.analysis.curves import build_curves

    return write(summary, build_curves(run, summary), Path(html), load_context(run))


def _write_tables(run: RunDir, request: SummaryRequest, csv: str | None, parquet: str | None) -> None:
    """Write the CSV and Parquet files. Raise ConfigError if one cannot be written, UsageError if no GPU matches."""
    from clustertrain import extras
    from clustertrain.cli.progress import ProgressBar
    from clustertrain.telemetry.analysis.summarize import select_records

    extras.require("pyarrow", f"telemetry {'--csv' if csv is not None else '--parquet'}")
    from clustertrain.telemetry.export import table

    parts, gpu_filter = select_records(run, request)
    table_parts = [table.AttemptSegment(p.attempt, p.segment) for p in parts if p.segment is not None]
    since = None if request.since_s is None else min((p.since for p in parts if p.since is not None), default=None)
    selection = table.RowFilter(gpu_filter, since)
    for path, write in ((csv, table.write_csv), (parquet, table.write_parquet)):
        if path is None:
            continue
        with ProgressBar(f"writing {path}") as bar:
            result = write(table_parts, path, selection, bar)
        for problem in result.errors:
            click.echo(f"clustertrain: left out: {problem}", err=True)
        if path != table.STDOUT:
            click.echo(f"{path}: {result.rows:,} rows", err=True)

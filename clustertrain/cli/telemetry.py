"""``clustertrain telemetry``: the per-job report on GPUs and hosts, and the comparison of two runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import find_run, json_option, print_json, run_argument
from clustertrain.errors import ClusterTrainError, UsageError

if TYPE_CHECKING:
    from clustertrain.run.contract_status import ContractStatus
    from clustertrain.run.goodput import Goodput
    from clustertrain.run.run_dir import RunDir


def parse_since(text: str) -> float:
    """A length of time as a recipe takes it, or a number of seconds.

    Raises:
        UsageError: it is neither, or nothing.
    """
    from clustertrain.config.parsing.durations import parse_duration_s

    since_s = float(text) if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text) else parse_duration_s(text)
    if since_s is None:
        raise UsageError(f"--since {text}: not a length of time", fix="write 90s, 10min, 1h or 1h30m")
    if since_s <= 0:
        raise UsageError(f"--since {text}: must be longer than nothing", fix="write 90s, 10min, 1h or 1h30m")
    return since_s


class CommandWithSubcommands(click.Command):
    """A command that takes a RUN, or a verb of its own in its place: ``telemetry RUN`` and ``telemetry compare A B``.

    A verb goes before a run of that name; run ids end in six random characters, so a prefix can always be longer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subcommands: dict[str, click.Command] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        subcommand = self.subcommands.get(args[0]) if args else None
        if subcommand is None:
            return super().make_context(info_name, args, parent, **extra)
        return subcommand.make_context(f"{info_name} {subcommand.name}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, subcommand.get_short_help_str(100)) for name, subcommand in self.subcommands.items()]
            )


@click.command(cls=CommandWithSubcommands)
@run_argument
@json_option
@click.option("--attempt", type=click.IntRange(min=1), help="Only this attempt.  [default: all]")
@click.option("--gpu", help="Only GPUs that fit: the beginning of a UUID, an index, or NODE:INDEX.")
@click.option("--since", help="Only the last part of what was recorded: 10m, 1h, …")
@click.option("--all", "every", is_flag=True, help="All GPUs, hosts, events and notes, however many there are.")
@click.option("--html", metavar="FILE", help="Write the report as one page with curves, which opens offline.")
@click.option("--csv", metavar="FILE", help="Write all samples as a table; - is standard output.")
@click.option("--parquet", metavar="FILE", help="Write all samples as a Parquet file.")
def telemetry(
    name: str,
    as_json: bool,
    attempt: int | None,
    gpu: str | None,
    since: str | None,
    every: bool,
    html: str | None,
    csv: str | None,
    parquet: str | None,
) -> None:
    """The report on a run's GPUs and hosts, over all nodes and attempts, while it runs and afterwards.

    RUN is a run id or a unique prefix of one, a job id, or `latest` (the default). With --html, --csv or --parquet the
    file is written and nothing is shown, unless --json asks for it.
    """
    since_s = None if since is None else parse_since(since)
    if html == "-":
        raise UsageError(
            "--html -: a page is a file, and does not go to standard output", fix="name one: --html report.html"
        )
    if as_json and csv == "-":
        raise UsageError("--json and --csv - both go to standard output", fix="name a file for one of them")
    # Not at the top: numpy and rich cost more than the rest of the command line together.
    from clustertrain.cli import telemetry_files as files
    from clustertrain.run.run_dir import explain_permission_errors
    from clustertrain.telemetry.analysis.summarize import SummaryRequest, summarize

    run = find_run(name)
    request = SummaryRequest(attempt, gpu, since_s, *_scheduler_state(run))
    files.check_html_path(html)
    with explain_permission_errors():
        if csv is not None or parquet is not None:
            files.write_tables(run, request, csv, parquet)
        if (csv is not None or parquet is not None) and html is None and not as_json:
            return
        summary = summarize(run, request)
        if html is not None:
            files.write_page(run, summary, html)
    if as_json:
        print_json(summary)
    if as_json or html is not None:
        return
    from clustertrain.report import telemetry as report
    from clustertrain.report.terminal import make_console

    report.show(summary, make_console(), every)


def _scheduler_state(run: RunDir) -> tuple[str | None, Goodput | None, ContractStatus | None]:
    """What the scheduler knows besides the run's own files."""
    from clustertrain.scheduler.run_status import run_status

    try:
        status = run_status(run)
    except (ClusterTrainError, OSError):  # another user's, or damaged; the report says what it can
        return None, None, None
    return status.state, status.goodput, status.contract


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@json_option
def compare(first: str, second: str, as_json: bool) -> None:
    """Two runs side by side: speed, utilization, power, goodput, notes and settings.

    A and B are runs as `clustertrain telemetry` takes them. Figures are a GPU's where the numbers of GPUs differ.
    """
    from clustertrain.run.run_dir import explain_permission_errors
    from clustertrain.telemetry.analysis import compare as comparison

    with explain_permission_errors():
        result = comparison.compare_runs(find_run(first), find_run(second))
    if as_json:
        print_json(result)
        return
    from clustertrain.report import telemetry_compare as report
    from clustertrain.report.terminal import make_console

    report.show(result, make_console())


telemetry.subcommands["compare"] = compare

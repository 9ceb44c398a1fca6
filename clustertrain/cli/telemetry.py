"""``clustertrain telemetry``: the per-job report on GPUs and hosts, and the comparison of two runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import find_run, json_option, print_json, run_argument
from clustertrain.errors import ClusterTrainError, UsageError

if TYPE_CHECKING:
    from clustertrain.run.contract_status import Standing
    from clustertrain.run.goodput import Goodput
    from clustertrain.run.run_dir import RunDir


def seconds(text: str) -> float:
    """A length of time as a recipe takes it, or a number of seconds.

    Raises:
        UsageError: it is neither, or nothing.
    """
    from clustertrain.config.durations import duration_s

    found = float(text) if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text) else duration_s(text)
    if found is None:
        raise UsageError(f"--since {text}: not a length of time", fix="write 90s, 10min, 1h or 1h30m")
    if found <= 0:
        raise UsageError(f"--since {text}: must be longer than nothing", fix="write 90s, 10min, 1h or 1h30m")
    return found


class WithVerbs(click.Command):
    """A command that takes a RUN, or a verb of its own in its place: ``telemetry RUN`` and ``telemetry compare A B``.

    A verb goes before a run of that name; run ids end in six random characters, so a prefix can always be longer.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.verbs: dict[str, click.Command] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        verb = self.verbs.get(args[0]) if args else None
        if verb is None:
            return super().make_context(info_name, args, parent, **extra)
        return verb.make_context(f"{info_name} {verb.name}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(100)) for name, verb in self.verbs.items()])


@click.command(cls=WithVerbs)
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
    since_s = None if since is None else seconds(since)
    if html == "-":
        raise UsageError(
            "--html -: a page is a file, and does not go to standard output", fix="name one: --html report.html"
        )
    if as_json and csv == "-":
        raise UsageError("--json and --csv - both go to standard output", fix="name a file for one of them")
    # Not at the top: numpy and rich cost more than the rest of the command line together.
    from clustertrain.cli import telemetry_files as files
    from clustertrain.run.run_dir import readable
    from clustertrain.telemetry.analysis.summarize import Request, summarize

    run = find_run(name)
    request = Request(attempt, gpu, since_s, *_state_of(run))
    files.check(html)
    with readable():
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


def _state_of(run: RunDir) -> tuple[str | None, Goodput | None, Standing | None]:
    """What the scheduler knows besides the run's own files."""
    from clustertrain.scheduler.run_status import look

    try:
        seen = look(run)
    except (ClusterTrainError, OSError):  # another user's, or damaged; the report says what it can
        return None, None, None
    return seen.state, seen.goodput, seen.contract


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@json_option
def compare(first: str, second: str, as_json: bool) -> None:
    """Two runs side by side: speed, utilization, power, goodput, notes and settings.

    A and B are runs as `clustertrain telemetry` takes them. Figures are a GPU's where the numbers of GPUs differ.
    """
    from clustertrain.run.run_dir import readable
    from clustertrain.telemetry.analysis import compare as comparison

    with readable():
        found = comparison.of_runs(find_run(first), find_run(second))
    if as_json:
        print_json(found)
        return
    from clustertrain.report import telemetry_compare as report
    from clustertrain.report.terminal import make_console

    report.show(found, make_console())


telemetry.verbs["compare"] = compare

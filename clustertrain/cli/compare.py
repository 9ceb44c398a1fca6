"""``clustertrain compare``: compare runs."""

from __future__ import annotations

from pathlib import Path

import click

from clustertrain.cli.common import find_runs, json_option, print_json
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import UsageError


@click.command()
@click.argument("names", metavar="A B [C…]", nargs=-1, required=True, shell_complete=complete_runs)
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Metric to show; the first one ranks the runs."
)
@click.option("--by", type=click.Choice(["step", "tokens", "hours"]), default="step", show_default=True, help="X-axis.")
@click.option("--html", metavar="FILE", help="Write a self-contained page with the curves.")
@json_option
def compare(names: tuple[str, ...], metrics: tuple[str, ...], by: str, html: str | None, as_json: bool) -> None:
    """Compare runs: which is best, curves, settings that differ and, for two runs, their telemetry.

    The metric of the recipes' contract decides which is best. A sweep stands for all its runs.

    \b
    clustertrain compare net-abc234 net-def567
    clustertrain compare SWEEP --metric loss --by hours --html curves.html
    """
    from clustertrain.report.html import check_path
    from clustertrain.report.runs import compare as comparison
    from clustertrain.run.run_dir import explain_permission_errors

    if html is not None:
        check_path(Path(html))
    run_dirs = find_runs(names)
    if len(run_dirs) < len(names):
        raise UsageError("compare: the same run is given twice")
    with explain_permission_errors():
        result = comparison.compare_runs(run_dirs, metrics, by)  # type: ignore[arg-type]
    if html is not None:
        from clustertrain.report.html.runs_page import write

        click.echo(f"{html}: {write(result, Path(html)) / 1e3:,.0f} kB", err=True)
    if as_json:
        print_json("compare", result)
    elif html is None:
        from clustertrain.report.runs import compare_text
        from clustertrain.report.terminal import make_console

        compare_text.show(result, make_console(rows=True))

"""``diagnose``: check a recipe before a long job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import json_option, print_json, set_option
from clustertrain.cli.completion import complete_checks
from clustertrain.errors import EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from clustertrain.diagnose.registry import Finding


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@set_option
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html|.svg",
    help="Write the curves of the checks that have them.",
)
@json_option
@click.argument("check", required=False, metavar="[CHECK]", shell_complete=complete_checks)
@click.argument("recipe", required=False, metavar="[RECIPE.toml]")
def diagnose(
    assignments: tuple[str, ...], plot: Path | None, as_json: bool, check: str | None, recipe: str | None
) -> int:
    """Check a recipe on this machine before a long job: one process, no run, no Slurm.

    `diagnose` without arguments lists the checks. Without CHECK, or with `all`, it runs all of them. Each check reports
    a verdict, the evidence and a fix. Exits 1 if a check fails, 78 if the recipe cannot be trained.
    """
    from clustertrain.diagnose import registry

    if check is None:
        _list_checks(as_json=as_json)
        return 0
    if Path(check).suffix:
        check, recipe = recipe or registry.ALL, check
    checks = registry.select_checks(check)
    if recipe is None:
        raise UsageError("diagnose: no recipe", fix=f"clustertrain diagnose {check} RECIPE.toml")
    from clustertrain.diagnose import plots, runner, terminal
    from clustertrain.report.terminal import make_console

    if plot is not None:
        plots.check_path(plot)
    prepared = runner.prepare_diagnosis(recipe, assignments)
    console = make_console()

    def on_finding(finding: Finding) -> None:
        if not as_json:
            bar.hide()
            terminal.show_finding(console, finding)

    with terminal.CheckProgressBar(len(checks)) as bar:
        result = runner.diagnose(prepared, recipe, checks, bar, on_finding)
    if plot is not None:
        plots.write(plot, result.checks)
    if as_json:
        from clustertrain.report.documents.tools import CheckResult, Diagnosis

        rows = tuple(CheckResult(**{n: getattr(c, n) for n in CheckResult.__struct_fields__}) for c in result.checks)
        print_json(
            "diagnose",
            Diagnosis(recipe=result.recipe, device=result.device, checks=rows, verdict=result.verdict),
        )
    else:
        terminal.show_summary(console, result)
    return EXIT_FAILED if result.verdict == "fail" else 0


def _list_checks(*, as_json: bool) -> None:
    from clustertrain.diagnose.registry import ALL, CHECKS

    if as_json:
        from clustertrain.report.documents.tools import CheckNames

        print_json("diagnose-checks", CheckNames(checks=dict(CHECKS)))
        return
    rows = {**CHECKS, ALL: "All of these, in this order (the default)."}
    formatter = click.get_current_context().make_formatter()
    formatter.write_dl(list(rows.items()))
    click.echo(formatter.getvalue(), nl=False)

"""``clustertrain open``: the report of a run as a page, in a browser if there is one."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Mapping
from pathlib import Path

import click

from clustertrain.cli.common import find_run, run_argument

PAGE = "report.html"  # in the run folder


@click.command("open")
@run_argument
@click.option("-o", "--output", metavar="FILE", help="Write the page there instead of in the run folder.")
@click.option("--no-browser", is_flag=True, help="Only write the page, and print its path.")
def open_(name: str, output: str | None, no_browser: bool) -> None:
    """Write RUN's report as a self-contained page and open it in a browser.

    Where no browser can be opened, as on a login node, only the path of the page is printed.
    """
    from clustertrain.cli.telemetry import write_report_page
    from clustertrain.run.run_dir import explain_permission_errors

    run = find_run(name)
    if output is not None:
        page = Path(output)
    elif os.access(run.path, os.W_OK):
        page = run.path / PAGE
    else:  # another user's run
        page = Path(tempfile.mkdtemp(prefix=f"{run.id}-"), PAGE)
    with explain_permission_errors():
        write_report_page(run, page)
    click.echo(page)
    if not no_browser and has_browser(os.environ) and not webbrowser.open(page.resolve().as_uri()):
        click.echo("note: the browser did not start; copy the page to your machine", err=True)


def has_browser(environ: Mapping[str, str]) -> bool:
    """Return whether a browser can show a window here."""
    return sys.platform == "darwin" or any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))

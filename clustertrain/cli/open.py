"""``clustertrain open``: the report of a run as a page, in a browser if there is one."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import find_run, run_argument
from clustertrain.config.checks.storage_paths import is_url
from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir

PAGE = "report.html"  # in the run folder


@click.command("open")
@run_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE|URL",
    help="Write the page there instead of in the run folder; to an object store, such as s3://bucket/run.html.",
)
@click.option("--no-browser", is_flag=True, help="Only write the page, and print its path.")
def open_(name: str, output: str | None, no_browser: bool) -> None:
    """Write RUN's report as a self-contained page and open it in a browser.

    Where no browser can be opened, as on a login node, only the path of the page is printed.
    """
    from clustertrain.cli.telemetry import write_report_page
    from clustertrain.run.run_dir import explain_permission_errors

    run = find_run(name)
    if output is not None and is_url(output):
        _upload(run, output)
        return
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


def _upload(run: RunDir, url: str) -> None:
    """Write the page to ``url``, and print it.

    Raises:
        ConfigError: fsspec or the package of the protocol is not installed, or the store refuses the page.
    """
    from clustertrain.checkpoint.format.storage import RemoteFolder
    from clustertrain.cli.telemetry import write_report_page
    from clustertrain.run.run_dir import explain_permission_errors

    target = RemoteFolder(url)
    with tempfile.TemporaryDirectory() as folder, explain_permission_errors():
        page = Path(folder, PAGE)
        write_report_page(run, page)
        try:
            target.write_bytes(page.read_bytes())
        except (OSError, NotImplementedError) as e:
            reason = getattr(e, "strerror", None) or "this storage cannot be written"
            raise ConfigError(
                f"{url}: the page cannot be written: {reason}",
                fix="check the URL, and your credentials for the store",
            ) from e
    click.echo(url)


def has_browser(environ: Mapping[str, str]) -> bool:
    """Return whether a browser can show a window here."""
    return sys.platform == "darwin" or any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))

"""``clustertrain ui``: all runs as live pages in a browser."""

from __future__ import annotations

import getpass
import os
import socket
import webbrowser
from pathlib import Path

import click

from clustertrain import settings
from clustertrain.cli.open import has_browser
from clustertrain.errors import NotFound


@click.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="PORT", help="Port to use. [default: the first free one from 8470]"
)
@click.option("--home", metavar="DIR", help="Show the runs of DIR instead of $CLUSTERTRAIN_HOME.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def ui(port: int | None, home: str | None, no_browser: bool) -> int:
    """Serve live, read-only pages over all your runs on this machine, until Ctrl-C.

    The printed address has a token, without which nothing is shown. On a login node, the printed ssh line brings the
    pages to your own machine.
    """
    if home is not None:
        os.environ[settings.HOME] = str(_check_home(Path(home)))
    from clustertrain.ui import server

    listener = server.bind(port)
    port, token = listener.getsockname()[1], server.make_token()
    url = server.format_url(port, token)
    click.echo(f"{url}\nCtrl-C ends it.")
    if no_browser or not has_browser(os.environ) or not webbrowser.open(url):
        click.echo(
            "No browser here? On your own machine, run the next line, then open the address above:\n"
            f"  ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.getfqdn()}"
        )
    server.serve(listener, token)
    return 0


def _check_home(folder: Path) -> Path:
    """Return the absolute path of a home. Raise NotFound if it is none."""
    if not folder.is_dir():
        raise NotFound(f"--home {folder}: no such folder", fix="pass the folder that holds runs/")
    path = folder.resolve()
    if path.name == "runs" and not (path / "runs").is_dir():
        raise NotFound(f"--home {folder}: a folder of runs, not a home", fix=f"pass the folder above: {path.parent}")
    return path

"""``clustertrain ui``: all runs as live pages in a browser."""

from __future__ import annotations

import contextlib
import html
import os
import socket
import tempfile
import webbrowser
from collections.abc import Iterator
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
        os.environ[settings.HOME] = str(_check_home(home))
    from clustertrain.ui import server

    listener = server.bind(port)
    port, token = listener.getsockname()[1], server.make_token()
    url = server.format_url(port, token)
    click.echo(f"{url}\nCtrl-C ends it.")
    with _open_browser(url) if not no_browser and has_browser(os.environ) else contextlib.nullcontext(False) as opened:
        if not opened:
            click.echo(
                "No browser here? Run this on your own machine, then open the address above:\n"
                f"  ssh -L {port}:127.0.0.1:{port} {settings.user_name()}@{socket.getfqdn()}"
            )
        server.serve(listener, token)
    return 0


@contextlib.contextmanager
def _open_browser(url: str) -> Iterator[bool]:
    """Open ``url`` in a browser, and yield whether one was found.

    The browser opens a file of the user that leads to ``url``: all users of the machine can read the arguments of a
    process, so the token must not be one.
    """
    folder = settings.cache_folder() / "ui"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, name = tempfile.mkstemp(prefix="open-", suffix=".html", dir=folder)
    except OSError:
        yield False
        return
    try:
        with os.fdopen(fd, "w") as page:
            page.write(f'<!DOCTYPE html><meta http-equiv="refresh" content="0;url={html.escape(url)}">\n')
        yield webbrowser.open(Path(name).as_uri())
    finally:
        Path(name).unlink(missing_ok=True)


def _check_home(home: str) -> Path:
    """Return the absolute path of a home. Raise NotFound if it is none."""
    folder = Path(home)
    if not home or not folder.is_dir():  # Path("") is the current folder
        raise NotFound(f"--home {home!r}: no such folder", fix="pass the folder that holds runs/")
    path = folder.resolve()
    if path.name == "runs" and not (path / "runs").is_dir():
        raise NotFound(f"--home {home!r}: a folder of runs, not a home", fix=f"pass the folder above: {path.parent}")
    return path
